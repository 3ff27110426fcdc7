//! Datagrams that are longer than a packet may be. They and their answers travel in fragments.

use anyhow::{Context as _, Result, bail, ensure};
use lab::{Dial, address::Family, cluster::OUTSIDE};

use crate::{
    case::{Case, Difference, Variant, Variants, says},
    check,
    fixtures::{ON_NODE1, ON_NODE2, ServiceFixture},
    setting::{Datapath, ProxyKind, Setting},
    world::World,
};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "fragments: datagrams to an endpoint of node 1, and their answers",
        Variants::Udp,
        |world, variant| through_fragments(world, variant, &ON_NODE1),
    )
    .core()
    .differs(too_big_for_ip_vs),
    Case::new(
        "fragments: datagrams to an endpoint of node 2, and their answers",
        Variants::Udp,
        |world, variant| through_fragments(world, variant, &ON_NODE2),
    )
    .core()
    .differs(too_big_for_ip_vs),
    Case::new(
        "fragments: the first one first, the others in another order",
        Variants::Udp,
        |world, variant| in_order(world, variant, &[0, 3, 2, 1], ANSWERED_WITHIN_MS),
    )
    .differs(too_big_for_ip_vs),
    Case::new("fragments: the first one last", Variants::Udp, |world, variant| {
        let is_answered = not_reassembled(&world.setting, variant).is_none();
        in_order(world, variant, &[3, 2, 1, 0], if is_answered { ANSWERED_WITHIN_MS } else { SILENCE_MS })
    })
    .differs(|setting, variant| {
        not_reassembled(setting, variant).or_else(|| too_big_for_ip_vs(setting, variant))
    }),
];

/// Explains a limit of the kernel's ip_vs, whichever proxy writes its virtual servers.
fn too_big_for_ip_vs(setting: &Setting, variant: Variant) -> Option<Difference> {
    let why = "ip_vs answers an IPv6 datagram that is longer than a packet with packet too big, in place of sending it on in fragments";
    (setting.datapath() == Datapath::Ipvs && variant.family == Family::V6)
        .then_some(Difference { why, says: says::NOT_ANSWERED })
}

fn not_reassembled(setting: &Setting, _: Variant) -> Option<Difference> {
    let why = "programs of TC see packets before the kernel reassembles them, and cannot hold one back until its ports are known";
    (setting.proxy == ProxyKind::Ebpf).then_some(Difference { why, says: says::NOT_ANSWERED })
}

/// Lengths of datagrams that travel in 2, 6 and 41 fragments.
const SIZES: [usize; 3] = [2_000, 8_000, 60_000];

/// Sends datagrams of every client to every frontend. Node 1 leads to both endpoints.
fn through_fragments(world: &mut World, variant: Variant, service: &ServiceFixture) -> Result<()> {
    let [server] = service.endpoints else { bail!("{} has not one endpoint", service.name) };
    let (cluster_ip, node_port) =
        (world.cluster_ip(service, variant.family), world.node_port(service, 1, variant.family)?);
    // With IPVS, the node's own socket gets EMSGSIZE.
    let of_node = (world.setting.datapath() != Datapath::Ipvs).then_some(("node1", cluster_ip));
    for (client, target) in of_node.into_iter().chain([
        ("client-1", cluster_ip),
        ("client-2", cluster_ip),
        ("client-1", node_port),
        ("client-2", node_port),
        ("node2", node_port),
        (OUTSIDE, node_port),
    ]) {
        for size in SIZES {
            let created = || {
                let of = |name: &str| world.lab.fragments_created(name, variant.family);
                Ok::<_, anyhow::Error>((of(client)?, of(server)?))
            };
            let before = created()?;
            let answers =
                world.answers(client, &Dial::new(variant.protocol, target).payload(size), &[server]);
            for answer in answers.with_context(|| format!("{size} bytes"))? {
                ensure!(answer.bytes == size, "{} of {size} bytes arrived", answer.bytes);
            }
            let after = created()?;
            ensure!(
                after.0 > before.0 && after.1 > before.1,
                "{size} bytes from {client} to {target} were not sent in fragments: {before:?}, then {after:?}"
            );
        }
    }
    Ok(())
}

/// Milliseconds within which an answer must come, on a busy machine too.
const ANSWERED_WITHIN_MS: u64 = 10_000;
/// Milliseconds that are long enough to see that nobody answers.
const SILENCE_MS: u64 = 300;

/// Sends four fragments of a datagram, from a pod and from outside.
fn in_order(world: &mut World, variant: Variant, order: &[usize], timeout_ms: u64) -> Result<()> {
    const SIZE: usize = 5_000;
    let cluster_ip = world.cluster_ip(&ON_NODE2, variant.family);
    let node_port = world.node_port(&ON_NODE2, 1, variant.family)?;
    for (client, target) in [("client-1", cluster_ip), ("client-2", cluster_ip), (OUTSIDE, node_port)] {
        let source = world.addresses(client)?.of(variant.family);
        let outcome = world.agent(client)?.dial_in_fragments(source, target, SIZE, order, timeout_ms)?;
        let outcomes = [outcome];
        let answers = check::answered_by(&outcomes, ON_NODE2.endpoints);
        for answer in answers.with_context(|| format!("from {client} to {target}"))? {
            ensure!(answer.bytes == SIZE, "{} of {SIZE} bytes arrived", answer.bytes);
            ensure!(answer.peer == target, "{} answered for {target}", answer.peer);
        }
    }
    Ok(())
}

//! Traffic policies that allow only endpoints of the own node.

use anyhow::Result;
use lab::{Dial, Protocol, cluster::OUTSIDE, wait};

use super::cluster_ip::carried;
use crate::{
    case::{Case, Difference, Variant, Variants, says},
    check,
    fixtures::{EXTERNAL_LOCAL_ON_NODE1, INTERNAL_LOCAL, INTERNAL_LOCAL_ON_NODE2},
    setting::{Datapath, Setting},
    world::World,
};

/// Returns milliseconds that are long enough to see that nobody answers or refuses.
fn silence() -> u64 {
    300 * u64::from(wait::patience())
}

pub(in crate::cases) const CASES: &[Case] = &[
    Case::new("internal policy Local: clients get the endpoint of their node", Variants::All, internal),
    Case::new("internal policy Local: no endpoint on the node, dropped", Variants::All, internal_none)
        .differs(nobody_is_served),
    Case::new("external policy Local: the client outside keeps its address", Variants::All, external)
        .differs(carried),
    Case::new("external policy Local: no endpoint on the node, dropped", Variants::All, external_none)
        .differs(accepted_first),
    Case::new(
        "external policy Local: clients on a node get every endpoint",
        Variants::All,
        external_from_inside,
    ),
];

fn nobody_is_served(setting: &Setting, _: Variant) -> Option<Difference> {
    let why = match setting.datapath() {
        Datapath::Userspace => "in mode userspace clients are refused where no client is served",
        Datapath::Ipvs => {
            "a virtual server without destinations refuses, and other policies of the Service ask for none"
        }
        Datapath::Ebpf | Datapath::Nftables | Datapath::Iptables => return None,
    };
    Some(Difference { why, says: &["expected dropped, found refused"] })
}

pub(in crate::cases) fn accepted_first(setting: &Setting, variant: Variant) -> Option<Difference> {
    let why = "in mode userspace a connection is accepted before its policy is known, and reset";
    let is_accepted = setting.datapath().is_a_process() && variant.protocol == Protocol::Tcp;
    is_accepted.then_some(Difference { why, says: says::NOT_DROPPED })
}

fn internal(world: &mut World, variant: Variant) -> Result<()> {
    let dial = Dial::new(variant.protocol, world.cluster_ip(&INTERNAL_LOCAL, variant.family)).times(10);
    for (client, server) in [("client-1", "web-1"), ("client-2", "web-2"), ("node1", "web-1")] {
        world.answers(client, &dial, &[server])?;
    }
    Ok(())
}

fn internal_none(world: &mut World, variant: Variant) -> Result<()> {
    let target = world.cluster_ip(&INTERNAL_LOCAL_ON_NODE2, variant.family);
    let dial = Dial::new(variant.protocol, target).timeout_ms(silence());
    let outcomes = world.dial("client-1", &dial)?;
    if world.setting.pods_use_sockets() {
        // A hook can only make `connect` fail, so the client is refused at once.
        check::refused_at_once(world.setting, &outcomes)?;
    } else {
        check::dropped(world.setting, &outcomes)?;
    }
    world.answers("client-2", &dial, &["web-2"]).map(drop)
}

fn external(world: &mut World, variant: Variant) -> Result<()> {
    let target = world.node_port(&EXTERNAL_LOCAL_ON_NODE1, 1, variant.family)?;
    let answers = world.answers(OUTSIDE, &Dial::new(variant.protocol, target).times(10), &["web-1"])?;
    let outside = world.addresses(OUTSIDE)?;
    check::saw(&answers, "the client outside", |seen| outside.contains(seen))
}

fn external_none(world: &mut World, variant: Variant) -> Result<()> {
    let target = world.node_port(&EXTERNAL_LOCAL_ON_NODE1, 2, variant.family)?;
    let dial = Dial::new(variant.protocol, target).timeout_ms(silence());
    check::dropped(world.setting, &world.dial(OUTSIDE, &dial)?)
}

fn external_from_inside(world: &mut World, variant: Variant) -> Result<()> {
    let target = world.node_port(&EXTERNAL_LOCAL_ON_NODE1, 2, variant.family)?;
    for client in ["client-2", "node2"] {
        world.answers(client, &Dial::new(variant.protocol, target).times(5), &["web-1"])?;
    }
    Ok(())
}

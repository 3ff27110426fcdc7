//! SCTP, on kernels that have it.

use anyhow::{Result, bail};
use lab::{
    Dial, Protocol,
    cluster::{OUTSIDE, SERVER_PORT},
    objects::{Service, ServicePort},
};
use scenario::Skip;

use crate::{
    case::{Case, Variant, Variants},
    fixtures::{PORT, RESTRICTED, SCTP},
    proxy::kernel_has,
    world::World,
};

pub(super) const CASES: &[Case] = &[
    Case::new("SCTP: every client reaches every endpoint", Variants::Tcp, reached).core(),
    Case::new("the other ports of a Service with SCTP are served", Variants::All, beside_sctp).core(),
];

const SCTP_PORT: u16 = 132;

/// Milliseconds that are longer than SCTP waits before it repeats an INIT (3 s at first, RFC 9260
/// section 16). The kernel's ip_vs drops an INIT from a port that was just closed, and SCTP chooses
/// its ports at random.
const PATIENCE_MS: u64 = 8_000;

/// Returns the Service whose one port is of SCTP.
pub(super) fn service() -> Service {
    let port = ServicePort {
        name: "sctp".to_owned(),
        protocol: Protocol::Sctp,
        port: PORT,
        target_port: SERVER_PORT,
        node_port: SCTP.node_port,
    };
    Service { ports: vec![port], ..SCTP.service() }
}

fn reached(world: &mut World, variant: Variant) -> Result<()> {
    if !kernel_has("sctp", "/proc/net/sctp") {
        bail!(Skip("this kernel has no SCTP (CONFIG_IP_SCTP)".into()));
    }
    for server in SCTP.endpoints {
        // Each family needs a server of its own.
        let address = (world.addresses(server)?.of(variant.family), SERVER_PORT).into();
        world.agent(server)?.serve_sctp(&[address])?;
    }
    world.set_service(&service(), SCTP.endpoints)?;
    let cluster_ip = world.cluster_ip(&SCTP, variant.family);
    let node_port = world.node_port(&SCTP, 1, variant.family)?;
    for (client, target) in
        [("client-1", cluster_ip), ("client-2", cluster_ip), ("node1", cluster_ip), (OUTSIDE, node_port)]
    {
        let dial = Dial::new(Protocol::Sctp, target).times(40).timeout_ms(PATIENCE_MS);
        world.answers(client, &dial, SCTP.endpoints)?;
    }
    world.remove_service(SCTP.name)
}

fn beside_sctp(world: &mut World, variant: Variant) -> Result<()> {
    let mut service = RESTRICTED.service();
    service.ports.push(ServicePort {
        name: "sctp".to_owned(),
        protocol: Protocol::Sctp,
        port: SCTP_PORT,
        target_port: SERVER_PORT,
        node_port: None,
    });
    world.set_service(&service, RESTRICTED.endpoints)?;
    let cluster_ip = Dial::new(variant.protocol, world.cluster_ip(&RESTRICTED, variant.family)).times(40);
    for client in ["client-1", "client-2", "node1"] {
        world.answers(client, &cluster_ip, RESTRICTED.endpoints)?;
    }
    world.remove_service(RESTRICTED.name)
}

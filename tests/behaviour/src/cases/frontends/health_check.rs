//! Questions of a load balancer to a node before it sends clients there.

use std::{net::SocketAddr, time::Duration};

use anyhow::Result;
use lab::{
    address::{self, Family},
    cluster::OUTSIDE,
    objects::{Ingress, Service},
    wait,
};

use crate::{
    case::{Case, Variant, Variants},
    fixtures::HEALTH_CHECKED,
    world::World,
};

pub(in crate::cases) const CASES: &[Case] =
    &[Case::new("health checks of a load balancer find the nodes with endpoints", Variants::Once, found)];

const PORT: u16 = 32_001;
/// Time within which the health check shows a change. It does so after the sync for which the world
/// waits.
const TOLD_WITHIN: Duration = Duration::from_secs(30);

fn found(world: &mut World, _: Variant) -> Result<()> {
    let ingress = |family| Ingress { address: address::external(1, 90).of(family), proxied: false };
    let service = Service {
        load_balancer: [Family::V4, Family::V6].map(ingress).to_vec(),
        health_check_node_port: Some(PORT),
        ..HEALTH_CHECKED.service()
    };
    for (endpoints, told) in [
        (&["web-1"][..], [(200, 1), (503, 0)]),
        (&["web-2", "web-3"], [(503, 0), (200, 2)]),
        (&[], [(503, 0); 2]),
    ] {
        world.set_service(&service, endpoints)?;
        for (node, (status, local)) in [1, 2].into_iter().zip(told) {
            asked(world, node, status, &format!("\"localEndpoints\": {local}"))?;
        }
    }
    world.remove_service(HEALTH_CHECKED.name)?;
    for node in [1, 2] {
        wait::until("the end of the health check", TOLD_WITHIN, || {
            Ok(get(world, node).is_err().then_some(()))
        })?;
    }
    Ok(())
}

fn get(world: &World, node: u8) -> Result<(u16, String)> {
    let target = SocketAddr::new(address::node(node).of(Family::V4), PORT);
    world.agent(OUTSIDE)?.http_get(target, "/")
}

fn asked(world: &World, node: u8, status: u16, local: &str) -> Result<()> {
    let what = format!("node{node} answers {status} with {local}");
    wait::until(&what, TOLD_WITHIN, || match get(world, node) {
        Ok((found, body)) if found == status && body.contains(local) => Ok(Some(())),
        Ok((found, body)) => Err(format!("{found}: {body}")),
        Err(error) => Err(format!("{error:#}")),
    })
}

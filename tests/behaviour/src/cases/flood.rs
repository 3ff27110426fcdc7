//! A flood of more new connections than a node opens.

use std::time::Duration;

use anyhow::{Result, ensure};
use lab::{Outcome, agent::protocol::Load, cluster::OUTSIDE, wait};
use serde_json::json;

use crate::{
    case::{Case, Variant, Variants},
    fixtures::{BALANCED, ON_NODE1},
    setting::ProxyKind,
    world::World,
};

pub(super) const CASES: &[Case] =
    &[Case::new("a flood of new connections to one Service leaves others served", Variants::All, flood)
        .concerns(|setting| setting.proxy == ProxyKind::Ebpf)
        .configured(|| json!({"ebpf": {"newConnectionsPerCore": 600}}))];

/// Number of clients that flood. Each opens another connection once it has an answer, or has had
/// none for a moment.
const FLOODERS: u32 = 100;
/// Reason by which dropped packets are counted.
const LIMITED: &str = "connections_limited";
/// Microseconds below the second after which a SYN is repeated. A connection that is faster has
/// lost no SYN.
const AT_ONCE: u64 = 950_000;
const LIMIT: Duration = Duration::from_secs(60);

fn flood(world: &mut World, variant: Variant) -> Result<()> {
    let flooded = world.node_port(&ON_NODE1, 1, variant.family)?;
    let quiet = world.node_port(&BALANCED, 1, variant.family)?;
    let before = world.counted(1, LIMITED)?;
    let held = world.agent(OUTSIDE)?.hold(variant.protocol, flooded)?.0;
    let load =
        Load { clients: FLOODERS, pause_micros: 0, timeout_ms: 50, ..Load::new(variant.protocol, flooded) };
    let load = world.agent(OUTSIDE)?.start_load(&load)?;
    let met = others_are_served(world, Load::new(variant.protocol, quiet), held);
    let tally = world.agent(OUTSIDE)?.stop_load(load)?;
    world.agent(OUTSIDE)?.release(held)?;
    met?;
    ensure!(tally.answered > 0, "nobody of the flood was served: {tally:?}");
    let dropped = world.counted(1, LIMITED)? - before;
    ensure!(dropped > 100, "{dropped} packets were dropped, of a flood with {tally:?}");
    Ok(())
}

/// Expects clients of another service, who open fewer connections than its share, to be served.
fn others_are_served(world: &World, quiet: Load, held: usize) -> Result<()> {
    let agent = world.agent(OUTSIDE)?;
    let load = agent.start_load(&Load { pause_micros: 20_000, ..quiet })?;
    let asked = wait::until("other connections", LIMIT, || {
        let tally = agent.peek_load(load).map_err(|error| format!("{error:#}"))?;
        if tally.answered + tally.failed >= 50 { Ok(Some(())) } else { Err(format!("{tally:?}")) }
    });
    let tally = agent.stop_load(load)?;
    asked?;
    ensure!(tally.failed == 0 && tally.slowest_micros < AT_ONCE, "beside the flood: {tally:?}");
    let outcome = agent.ping(held)?;
    ensure!(matches!(outcome, Outcome::Answered(_)), "a connection that was there: {outcome}");
    Ok(())
}

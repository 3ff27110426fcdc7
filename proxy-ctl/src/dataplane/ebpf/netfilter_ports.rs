//! TCP connections that netfilter goes on translating: those that a former proxy's rules have opened. Were the address and port that
//! one's answers go to given to a flow towards the same endpoint, the programs would take the answers.

use std::collections::HashSet;

use proxy_common::{layout::Flow, port::Port};

use super::{Error, family::TableFamily, tables::FamilyTables};
use crate::{dataplane::conntrack::address_family, sys::conntrack::Conntrack};

/// After which step they are to be kept next: rules go on opening connections until all is taken over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum KeepPorts {
    BeforePackets,
    AfterModeBeside,
    Done,
}

/// Keeps what answers of one family go to from flows. `ports`: those of masqueraded flows. Answers how many were not kept
/// before.
pub(super) fn keep<F: TableFamily>(
    tables: &FamilyTables<F>,
    conntrack: &Conntrack,
    ports: &HashSet<u16>,
    now: u64,
) -> Result<u64, Error> {
    // The other half is for flows.
    let most = u64::from(tables.flows.map().capacity() / 2);
    let connections =
        conntrack.translated_connections(address_family(F::FAMILY)).map_err(Error::Conntrack)?;
    let (mut kept, mut there) = (0, 0);
    for connection in connections {
        let (backend_port, port) =
            (Port::new(connection.replier.port()), Port::new(connection.answers_to.port()));
        let (Some(backend), Some(address)) =
            (F::address(connection.replier.ip()), F::address(connection.answers_to.ip()))
        else {
            continue;
        };
        if connection.is_masqueraded && !ports.contains(&port.number()) {
            continue;
        }
        if there == most {
            tracing::warn!(
                most,
                "netfilter translates more connections than are kept apart from flows (half of ebpf.limits.flows)"
            );
            break;
        }
        let (key, flow) =
            Flow::of_netfilter((backend, backend_port), (address, port), connection.is_masqueraded, now);
        // A flow that has the port already goes on.
        if tables.opening_flows.get(&key)?.is_none() {
            kept += u64::from(tables.flows.insert(&key, &flow)?);
            there += 1;
        }
    }
    Ok(kept)
}

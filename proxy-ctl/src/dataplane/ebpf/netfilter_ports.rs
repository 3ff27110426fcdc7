//! Ports of TCP connections that netfilter goes on masquerading: those that a former proxy's rules have opened. Were one of them given
//! to a flow towards the same endpoint, the programs would take the answers of netfilter's connection.

use proxy_common::{
    layout::Flow,
    port::{Port, PortRanges},
};

use super::{Error, family::TableFamily, tables::FamilyTables};
use crate::{dataplane::conntrack::address_family, sys::conntrack::Conntrack};

/// Before which step they are to be kept next.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum KeepPorts {
    BeforePackets,
    /// Again: rules go on opening connections until frontends are served.
    AfterFrontends,
    Done,
}

/// Keeps ports of `ports` from flows of one family. Answers how many.
pub(super) fn keep<F: TableFamily>(
    tables: &FamilyTables<F>,
    conntrack: &Conntrack,
    ports: PortRanges,
    now: u64,
) -> Result<u64, Error> {
    let mut kept = 0;
    for connection in
        conntrack.masqueraded_connections(address_family(F::FAMILY)).map_err(Error::Conntrack)?
    {
        let (backend_port, port) =
            (Port::new(connection.replier.port()), Port::new(connection.source.port()));
        let (Some(backend), Some(source)) =
            (F::address(connection.replier.ip()), F::address(connection.source.ip()))
        else {
            continue;
        };
        if !ports.contain(port) {
            continue;
        }
        let flow = Flow::of_netfilter((backend, backend_port), (source, port), now);
        let key = flow.masqueraded_reply_key();
        // A flow that has the port already goes on.
        if tables.opening_flows.get(&key)?.is_none() {
            kept += u64::from(tables.flows.insert(&key, &flow)?);
        }
    }
    Ok(kept)
}

//! Session affinity after a service port has lost an endpoint: its clients are forgotten, so that
//! they do not find the endpoint again when it comes back.

use std::collections::BTreeSet;

use super::{
    error::Error,
    frame::Context,
    language::{address_length, endpoint_bytes},
    names::PortNames,
    render::used,
};
use crate::{
    model::desired::DesiredPort,
    names::NFTABLES_TABLE as TABLE,
    sys::nftables::{Batch, NfTables},
};

/// The number of attempts at one deletion. Elements may expire between reading and deleting, and
/// then the kernel deletes none of the others.
const TRIES: usize = 4;

/// Deletes the remembered clients of all endpoints that this port does not use. By then no rule may
/// remember a client for another endpoint.
pub(super) fn forget_others(nftables: &NfTables, port: &DesiredPort, context: &Context) -> Result<(), Error> {
    let family = context.language.table_family();
    let name = PortNames::new(&port.name).affinity();
    let endpoints: BTreeSet<Vec<u8>> =
        used(port, context).map(|endpoint| endpoint_bytes(endpoint.address, endpoint.port)).collect();
    let client = address_length(context.language.family);
    for _ in 0..TRIES {
        let mut keys: Vec<Vec<u8>> =
            nftables.elements(family, TABLE, &name)?.into_iter().map(|element| element.key).collect();
        keys.retain(|key| key.get(client..).is_some_and(|endpoint| !endpoints.contains(endpoint)));
        if keys.is_empty() {
            return Ok(());
        }
        let mut batch = Batch::default();
        batch.delete_elements(family, TABLE, &name, keys.iter().map(Vec::as_slice));
        if nftables.commit(batch)?.is_empty() {
            return Ok(());
        }
    }
    let port = &port.name;
    tracing::warn!(%port, "clients of endpoints that are gone cannot be forgotten; they expire by themselves");
    Ok(())
}

//! Results of the clients in all switches.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use behaviour::setting::ProxyKind;
use lab::{Protocol, Tally};

use crate::{
    run::RunningLoad,
    switch::{By, Switch},
};

/// Results of the clients in one switch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Met {
    pub(crate) connections: u64,
    pub(crate) failed: u64,
    /// Number of clients whose next attempt has failed too.
    pub(crate) without_retry: usize,
    pub(crate) held: usize,
    pub(crate) lost: usize,
    /// Longest time that a UDP socket that stays open had no answer.
    pub(crate) longest_silence_micros: u64,
}

pub(crate) type Matrix = Arc<Mutex<BTreeMap<Switch, Met>>>;

impl Met {
    pub(crate) fn new(tallies: &[(RunningLoad, Tally)], held: usize, lost: usize) -> Self {
        let mut met = Self { held, lost, ..Self::default() };
        for (load, tally) in tallies {
            if !load.keeps_socket {
                met.connections += tally.answered + tally.failed;
                met.failed += tally.failed;
                met.without_retry += usize::from(tally.failed_in_a_row > 1);
            } else if load.protocol == Protocol::Udp {
                met.longest_silence_micros = met.longest_silence_micros.max(tally.longest_outage_micros);
            }
        }
        met
    }
}

impl std::fmt::Display for Met {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { connections, failed, without_retry, held, lost, longest_silence_micros } = self;
        let silence = longest_silence_micros / 1_000;
        write!(formatter, "{failed}/{connections}, {without_retry}; {lost}/{held}; {silence} ms")
    }
}

/// Prints the matrix. `cargo xtask test` shows lines that begin with `| `.
pub(crate) fn print(matrix: &Matrix) {
    let matrix = matrix.lock().unwrap_or_else(PoisonError::into_inner);
    for by in [By::File, By::Process] {
        let of_kind = || matrix.keys().filter(|switch| switch.by == by);
        let mut targets: Vec<ProxyKind> = of_kind().map(|switch| switch.to).collect();
        targets.sort_unstable();
        targets.dedup();
        if targets.is_empty() {
            continue;
        }
        let what = match by {
            By::File => "live",
            By::Process => "new process",
        };
        let names: Vec<String> = targets.iter().map(ProxyKind::to_string).collect();
        println!(
            "| {what}: failed of new connections, clients whose retry failed too; lost of held connections; longest silence of a \
             UDP socket | {} |",
            names.join(" | ")
        );
        println!("|---{}|", "|---".repeat(targets.len()));
        let mut sources: Vec<ProxyKind> = of_kind().map(|switch| switch.from).collect();
        sources.sort_unstable();
        sources.dedup();
        for from in sources {
            let cell = |to: &ProxyKind| matrix.get(&Switch { from, to: *to, by }).map(Met::to_string);
            let cells: Vec<String> = targets.iter().map(|to| cell(to).unwrap_or_default()).collect();
            println!("| from {from} | {} |", cells.join(" | "));
        }
    }
}

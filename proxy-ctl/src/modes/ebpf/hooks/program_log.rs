//! Writes what the kernel programs log about refused and dropped clients to our own log. The
//! programs log only while its level is debug (`-v 4`, also if set at run time).

use std::{fmt, io};

use aya::{
    Ebpf,
    maps::{Array, MapData},
};
use aya_log::EbpfLogger;
use proxy_common::{
    inventory::map_name,
    layout::{LOG_LINES_PER_SECOND, LogControl},
    reason::Reason,
};
use tracing::Level;

use crate::modes::ebpf::Error;

const TARGET: &str = "proxy_ebpf";

/// The log lines of the packet programs. Each load of the object has maps of its own for them.
pub(crate) struct KernelLog {
    control: Array<MapData, LogControl>,
    lines: EbpfLogger<Lines>,
    enabled: bool,
}

impl fmt::Debug for KernelLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelLog").field("enabled", &self.enabled).finish_non_exhaustive()
    }
}

impl KernelLog {
    /// Takes the maps of the log from `object`. It is called before the programs are loaded.
    pub(crate) fn take(object: &mut Ebpf) -> Result<Self, Error> {
        let control =
            object.take_map(map_name::kernel_log).ok_or_else(|| failed("the object has no such map"))?;
        Ok(Self {
            control: Array::try_from(control).map_err(failed)?,
            lines: EbpfLogger::init_with_logger(object, Lines).map_err(failed)?,
            enabled: false,
        })
    }

    /// Writes the lines that have come, and switches the programs' log if the level of our log has
    /// changed.
    pub(crate) fn follow(&mut self) -> Result<(), Error> {
        // `flush` panics on a record that it cannot parse. Only our own programs write to this
        // buffer, which is not pinned.
        self.lines.flush();
        let enabled = tracing::enabled!(target: TARGET, Level::DEBUG);
        if enabled != self.enabled {
            let control = LogControl { enabled: enabled.into(), ..LogControl::default() };
            self.control.set(0, control, 0).map_err(failed)?;
            self.enabled = enabled;
            if enabled {
                tracing::debug!(
                    target: TARGET,
                    "the kernel programs log refused and dropped clients, at most {LOG_LINES_PER_SECOND} a second"
                );
            }
        }
        Ok(())
    }
}

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::KernelLog(io::Error::other(error))
}

/// Passes the lines that aya-log reads from the programs to the log of this process.
struct Lines;

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        tracing::debug!(target: TARGET, "{}", with_name(&record.args().to_string()));
    }

    fn flush(&self) {}
}

/// Replaces the number of the reason, in a line `reason <number>: …`, by its name.
fn with_name(line: &str) -> String {
    let named = || {
        let (number, rest) = line.strip_prefix("reason ")?.split_once(": ")?;
        let number: u32 = number.parse().ok()?;
        let reason = Reason::ALL.iter().find(|reason| **reason as u32 == number)?;
        Some(format!("{}: {rest}", reason.name()))
    };
    named().unwrap_or_else(|| line.to_owned())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::known("reason 3: protocol 6", "no_endpoints: protocol 6")]
    #[case::of_another_version("reason 63: protocol 6", "reason 63: protocol 6")]
    #[case::without_reason("something else", "something else")]
    fn reasons_have_their_name(#[case] line: &str, #[case] shown: &str) {
        assert_eq!(with_name(line), shown);
    }
}

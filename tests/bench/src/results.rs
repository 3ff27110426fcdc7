//! Results as the JSON file has them.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::{
    machine::Machine,
    plan::{CellName, Measure},
    statistics::Spread,
};

pub const FILE: &str = "results.json";

#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Results {
    pub machine: Machine,
    pub settings: Settings,
    pub cells: Vec<Cell>,
}

/// Settings of the measurements.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Settings {
    /// Build of the programs: `release` or `debug`.
    pub build: String,
    pub sizes: Vec<usize>,
    /// Number of endpoints of each Service that is not dialled.
    pub endpoints: usize,
    pub seconds: f64,
    /// Milliseconds of one side's turn, before the other side has its turn.
    pub turn_ms: u64,
    pub clients: u32,
    /// Connections a second while processor time is measured.
    pub pace: f64,
    /// Number of endpoint changes that are timed.
    pub rounds: usize,
    /// Number of endpoint changes whose processor time is measured.
    pub changes: usize,
    /// Number of flows of the forwarded packets.
    pub flows: u32,
    /// Rate of a flood.
    pub syns_per_second: u32,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Cell {
    #[serde(flatten)]
    pub name: CellName,
    pub outcome: Outcome,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Figures(Figures),
    Failed(String),
    Skipped(String),
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Figures {
    /// Requests a second. The ratio is service / direct, for turns that follow each other.
    Rates {
        direct: Rate,
        service: Rate,
        ratio: Spread,
    },
    /// Microseconds of processor time of the whole machine for a connection: client, server, kernel
    /// and proxy. `busy_at_rest` is the share of all cores that was busy just before. If it is
    /// large, the figure means nothing.
    Cpu {
        micros: Spread,
        busy_at_rest: f64,
    },
    /// Connections to a Service during a flood of another. `syns_per_second` counts only SYNs for
    /// which the device had room. Of the `held` established connections to the flooded Service,
    /// `lost` were lost. `dropped` is the share of the SYNs that the proxy's flood limit has
    /// dropped, if it has one.
    Flood {
        syns_per_second: f64,
        dropped: Option<f64>,
        ratio: Spread,
        p99_micros: f64,
        held: usize,
        lost: usize,
    },
    /// Rate of forwarded packets. `lost` is the share of the sent packets that was lost.
    Packets {
        per_second: Spread,
        nanos: f64,
        lost: f64,
    },
    Time {
        millis: f64,
    },
    Times {
        millis: Spread,
        longest: f64,
    },
    /// Processor time of the proxy, and the changes that it followed meanwhile in a second.
    Changes {
        cpu_seconds_per_1000: f64,
        per_second: f64,
    },
    /// Processor time of the proxy while nothing changes, in milliseconds of one core per minute.
    Rest {
        cpu_millis_per_minute: f64,
    },
    Memory {
        megabytes: f64,
    },
    /// Endpoint changes that the API server took in a second, and the delay with which the next one
    /// was followed. `writes` is the number of entries that were written for each, if the proxy
    /// counts them.
    Rollout {
        per_second: f64,
        behind_millis: f64,
        writes: Option<f64>,
    },
    Writes {
        entries: f64,
    },
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Rate {
    pub per_second: Spread,
    pub p50_micros: f64,
    pub p99_micros: f64,
}

/// Share of all cores above which a machine is too busy with other work to measure its processor
/// time.
pub const TOO_BUSY: f64 = 0.3;

impl Results {
    /// Replaces the file by one rename, so that a run that is ended leaves what it has found.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let (file, next) = (folder.join(FILE), folder.join(format!("{FILE}.next")));
        let text = self.to_json()?;
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        fs::write(&next, text).with_context(|| format!("writing {}", next.display()))?;
        fs::rename(&next, &file).with_context(|| format!("writing {}", file.display()))
    }

    /// Returns the text of the file. Each cell has its own line, so that two runs can be compared
    /// line by line.
    fn to_json(&self) -> serde_json::Result<String> {
        let Self { machine, settings, cells } = self;
        let (machine, settings) = (serde_json::to_string(machine)?, serde_json::to_string(settings)?);
        let cells =
            cells.iter().map(serde_json::to_string).collect::<serde_json::Result<Vec<_>>>()?.join(",\n");
        Ok(format!("{{\"machine\":{machine},\n\"settings\":{settings},\n\"cells\":[\n{cells}\n]}}\n"))
    }

    /// Reads the results of a run that was ended, to continue it. Cells without figures are left
    /// out. Machine and settings must be the same, because figures are compared with each other.
    pub fn resume(folder: &Path, machine: &Machine, settings: &Settings) -> Result<Vec<Cell>> {
        let former = Self::read(folder)?;
        ensure!(
            former.machine == *machine,
            "{FILE} is of another machine: {:?}; this is {machine:?}",
            former.machine
        );
        ensure!(
            former.settings == *settings,
            "{FILE} was measured with other settings: {:?}; these are {settings:?}",
            former.settings
        );
        let has_figures = |cell: &Cell| matches!(cell.outcome, Outcome::Figures(_));
        Ok(former.cells.into_iter().filter(has_figures).collect())
    }

    pub fn read(folder: &Path) -> Result<Self> {
        let file = folder.join(FILE);
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        serde_json::from_str(&text).with_context(|| format!("reading {}", file.display()))
    }

    /// Returns the figures of a contender. Those that the number of Services does not change are
    /// returned for each size.
    pub fn figures(
        &self,
        measure: Measure,
        route: Option<crate::plan::Route>,
        contender: &str,
        services: usize,
    ) -> Option<&Figures> {
        let is_it = |name: &CellName| {
            (name.measure, name.route, name.contender.as_str()) == (measure, route, contender)
                && [0, services].contains(&name.services)
        };
        self.cells.iter().find(|cell| is_it(&cell.name)).and_then(|cell| match &cell.outcome {
            Outcome::Figures(figures) => Some(figures),
            Outcome::Failed(_) | Outcome::Skipped(_) => None,
        })
    }

    pub fn failures(&self) -> impl Iterator<Item = (&CellName, &str)> {
        self.cells.iter().filter_map(|cell| match &cell.outcome {
            Outcome::Failed(reason) => Some((&cell.name, reason.as_str())),
            Outcome::Figures(_) | Outcome::Skipped(_) => None,
        })
    }
}

impl Figures {
    /// Returns the figures in a few words, for the line that shows progress.
    pub fn in_short(&self) -> String {
        match self {
            Self::Rates { service, ratio, .. } => {
                format!("{:.0}/s, {:.3} of direct", service.per_second.median, ratio.median)
            }
            Self::Cpu { micros, busy_at_rest } => format!(
                "{:.1} us of processor time each, others had {:.0} % of it",
                micros.median,
                busy_at_rest * 100.0
            ),
            Self::Flood { syns_per_second, ratio, held, lost, .. } => format!(
                "{:.3} of direct beside {syns_per_second:.0} SYNs/s, {lost} of {held} connections lost",
                ratio.median
            ),
            Self::Packets { per_second, nanos, lost } => {
                format!("{:.0} packets/s, {nanos:.0} ns each, {:.1} % lost", per_second.median, lost * 100.0)
            }
            Self::Time { millis } => format!("{millis:.1} ms"),
            Self::Times { millis, longest } => format!("{:.1} ms, at most {longest:.1} ms", millis.median),
            Self::Changes { cpu_seconds_per_1000, per_second } => {
                format!("{cpu_seconds_per_1000:.2} s of processor time for 1,000, at {per_second:.0}/s")
            }
            Self::Rest { cpu_millis_per_minute } => {
                format!("{cpu_millis_per_minute:.0} ms of processor time in a minute")
            }
            Self::Memory { megabytes } => format!("{megabytes:.1} MB"),
            Self::Rollout { per_second, behind_millis, writes } => {
                let writes =
                    writes.map_or_else(String::new, |count| format!(", {count:.2} entries for each"));
                format!("{behind_millis:.1} ms behind after {per_second:.0}/s{writes}")
            }
            Self::Writes { entries } => format!("{entries:.0} entries"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ended_run_is_resumed_where_it_was_measured_and_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let mut former = crate::render::tests::example();
        former.cells[0].outcome = Outcome::Failed("no port was free".into());
        former.write(folder.path()).unwrap();
        let Results { machine, settings, cells } = former;
        let resume =
            |machine: &Machine, settings: &Settings| Results::resume(folder.path(), machine, settings);

        let kept: Vec<_> = resume(&machine, &settings).unwrap().into_iter().map(|cell| cell.name).collect();
        assert_eq!(kept, cells[1..].iter().map(|cell| cell.name.clone()).collect::<Vec<_>>());
        let error = resume(&Machine { cores: 96, ..machine.clone() }, &settings).unwrap_err().to_string();
        assert!(error.contains("of another machine") && error.contains("cores: 96"), "{error}");
        let error = resume(&machine, &Settings { seconds: 1.0, ..settings }).unwrap_err().to_string();
        assert!(error.contains("with other settings") && error.contains("seconds: 1.0"), "{error}");
    }
}

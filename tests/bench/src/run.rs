//! Measures cell after cell. A cell that fails is reported by its name, and does not affect the
//! others.

use std::{
    io::{self, Write as _},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use behaviour::{proxy::missing_for, setting::ProxyKind};
use lab::wait;

use crate::{
    arguments::Arguments,
    cluster::Cluster,
    contender::{Contender, Kind},
    machine::Machine,
    measure::{
        change, flood,
        forward::{self, OneRule, Treatment},
        rollout, traffic,
    },
    plan::{self, CellName, Measure, ROUTES, Route},
    results::{Cell, Figures, Outcome, Results, Settings},
    subject::{self, Subject},
};

/// Time after which a proxy is given up that does not serve, or does not end its cleanup.
const PATIENCE: Duration = Duration::from_secs(600);

/// Size, contender, and the cells of the contender at this size.
type Planned = (usize, Contender, Vec<CellName>);

/// Returns all cells that the command line asks for.
pub fn planned(arguments: &Arguments) -> Vec<Planned> {
    let sizes = arguments.settings().sizes;
    let first = sizes.first().copied();
    let all = sizes.iter().flat_map(|size| {
        arguments.contenders().into_iter().map(move |contender| {
            (*size, contender, plan::cells(contender, *size, first == Some(*size), &arguments.filter))
        })
    });
    all.filter(|(_, _, cells)| !cells.is_empty()).collect()
}

/// Measures the cells. After each cell, the file in `output` has all results so far.
pub fn run(arguments: &Arguments, output: PathBuf) -> Result<Results> {
    let planned = planned(arguments);
    let count = planned.iter().map(|(_, _, cells)| cells.len()).sum();
    ensure!(count > 0, "no cell has such a name; --list shows all");
    let (machine, settings) = (Machine::describe(), arguments.settings());
    let found = match arguments.resume {
        true => Results::resume(&output, &machine, &settings)?,
        false => Vec::new(),
    };
    let mut cluster = step("starting a cluster: network namespaces, etcd, kube-apiserver", || {
        Cluster::start(arguments.endpoints)
    })?;
    let results = Results { machine, settings, cells: found };
    let mut record = Record { results, output, planned: count };
    let mut last = 0;
    for (size, contender, mut cells) in planned {
        cells.retain(|name| !record.has(name));
        if cells.is_empty() {
            continue;
        }
        if size > last
            && let Err(error) = step(&format!("a cluster of {size} Services"), || cluster.grow(size))
        {
            record.all(&cells, Outcome::Failed(format!("creating Services: {error:#}")))?;
            continue;
        }
        last = size;
        match missing_for_contender(contender) {
            Ok(None) => {}
            Ok(Some(reason)) => {
                record.all(&cells, Outcome::Skipped(reason))?;
                continue;
            }
            Err(error) => {
                record.all(&cells, Outcome::Failed(format!("{error:#}")))?;
                continue;
            }
        }
        if let Err(error) = contend(&mut cluster, &mut record, contender, &cells) {
            record.rest(&cells, &error)?;
        }
    }
    Ok(record.results)
}

fn missing_for_contender(contender: Contender) -> Result<Option<String>> {
    match contender.kind {
        Kind::Proxy { proxy, .. } => missing_for(proxy),
        Kind::Direct | Kind::Dropped | Kind::SentBack | Kind::OneRule => Ok(None),
    }
}

/// Measures the cells of a contender, and leaves nothing of it.
fn contend(
    cluster: &mut Cluster,
    record: &mut Record,
    contender: Contender,
    cells: &[CellName],
) -> Result<()> {
    if contender.cards {
        cluster.lab.equip_with_cards()?;
    }
    let done = match contender.kind {
        Kind::Proxy { proxy, .. } => with_proxy(cluster, record, contender, proxy, cells),
        Kind::Direct | Kind::Dropped | Kind::SentBack | Kind::OneRule => {
            cells.iter().try_for_each(|cell| record.cell(cell, |on| alone(cluster, on, contender, cell)))
        }
    };
    if contender.cards {
        cluster.lab.take_cards_out()?;
        cluster.lab.let_pods_take_frames(false)?;
    }
    done
}

/// Measures a cell of a contender that is no proxy.
fn alone(cluster: &Cluster, on: &Settings, contender: Contender, cell: &CellName) -> Result<Figures> {
    let route = route_of(cell)?;
    let treatment = match contender.kind {
        _ if cell.measure == Measure::Cpu => return traffic::processor_time(cluster, on, route, true),
        Kind::OneRule => {
            let rule = OneRule::install(cluster, route)?;
            let figures = forward::packets(cluster, on, route, Treatment::Translates);
            drop(rule);
            subject::sweep(&cluster.lab)?;
            return figures;
        }
        Kind::Dropped => Treatment::Drops,
        Kind::SentBack => Treatment::SendsBack,
        Kind::Direct | Kind::Proxy { .. } => Treatment::Forwards,
    };
    forward::packets(cluster, on, route, treatment)
}

fn with_proxy(
    cluster: &mut Cluster,
    record: &mut Record,
    contender: Contender,
    proxy: ProxyKind,
    cells: &[CellName],
) -> Result<()> {
    let Kind::Proxy { path, .. } = contender.kind else { bail!("{contender} is no proxy") };
    if change::is_served(&cluster.client)? {
        subject::sweep(&cluster.lab)?;
        ensure!(!change::is_served(&cluster.client)?, "the Service is served before {contender} runs");
    }
    let mut subject = Subject::new(cluster, proxy, path, contender.uses_xdp())?;
    let measured = step(&format!("{contender}: from its start to the first connection"), || {
        begin(cluster, &mut subject, contender.is_monitored())
    })
    .and_then(|millis| {
        for cell in cells {
            if cell.measure == Measure::Forward {
                // The XDP programs that make devices behave like network cards occupy the hooks of
                // the programs that send and drop.
                cluster.lab.free_ends_of_cards();
            }
            record.cell(cell, |on| figures(cluster, &mut subject, on, contender, cell, millis))?;
        }
        Ok(())
    });
    subject.kill()?;
    step(&format!("{contender}: removing what it has left"), || leave_nothing(cluster, &mut subject))?;
    measured
}

/// Starts the proxy, and returns the milliseconds until the first connection.
fn begin(cluster: &Cluster, subject: &mut Subject, monitored: bool) -> Result<f64> {
    let started = Instant::now();
    subject.start(&cluster.lab)?;
    while !change::is_served(&cluster.client)? {
        if let Some(reason) = subject.has_ended() {
            bail!(reason);
        }
        ensure!(started.elapsed() < PATIENCE, "nothing is served after {} s", PATIENCE.as_secs());
    }
    let millis = started.elapsed().as_secs_f64() * 1e3;
    for route in ROUTES {
        wait::until(route.describe(), PATIENCE, || {
            let served = traffic::is_served(cluster, route).map_err(|error| format!("{error:#}"))?;
            Ok(served.then_some(()))
        })?;
    }
    if monitored {
        subject.start_monitor(&cluster.lab)?;
    }
    Ok(millis)
}

/// Removes what a proxy has left. Its own cleanup is a cell, but it may not be asked for, or it may
/// have failed. It may also leave empty tables of iptables, which packets of the next contender
/// would pass.
fn leave_nothing(cluster: &Cluster, subject: &mut Subject) -> Result<()> {
    if let Err(error) = subject.clean_up(&cluster.lab, PATIENCE) {
        eprintln!("bench: {error:#}");
    }
    subject::sweep(&cluster.lab)
}

/// Returns the figures of a cell. If the proxy does not outlive the cell, the error says so, and
/// the next cell gets a new proxy.
fn figures(
    cluster: &Cluster,
    subject: &mut Subject,
    on: &Settings,
    contender: Contender,
    cell: &CellName,
    start_millis: f64,
) -> Result<Figures> {
    if subject.has_ended().is_some() {
        subject.kill()?;
        begin(cluster, subject, contender.is_monitored()).context("starting it again")?;
    }
    let found = figures_of(cluster, subject, on, contender, cell, start_millis);
    match subject.has_ended() {
        Some(reason) => bail!(reason),
        None => found,
    }
}

fn figures_of(
    cluster: &Cluster,
    subject: &mut Subject,
    on: &Settings,
    contender: Contender,
    cell: &CellName,
    start_millis: f64,
) -> Result<Figures> {
    match cell.measure {
        Measure::Start => Ok(Figures::Time { millis: start_millis }),
        Measure::FirstSync => Ok(Figures::Time { millis: subject.first_sync()?.millis }),
        Measure::Connect | Measure::Request | Measure::Bulk | Measure::Datagram => {
            traffic::rates(cluster, on, cell.measure, route_of(cell)?)
        }
        Measure::Cpu => traffic::processor_time(cluster, on, route_of(cell)?, false),
        Measure::Flood => flood::beside(cluster, subject, on, route_of(cell)?, contender.uses_xdp()),
        Measure::Forward => {
            let by_xdp = contender.uses_xdp();
            let treatment = if by_xdp { Treatment::TranslatesByXdp } else { Treatment::Translates };
            forward::packets(cluster, on, route_of(cell)?, treatment)
        }
        Measure::Change => change::times(cluster, on.rounds),
        Measure::ChangesCpu => change::processor_time(cluster, subject, on.changes),
        Measure::Rest => change::at_rest(subject, on),
        Measure::Memory => Ok(Figures::Memory { megabytes: subject.peak_resident_bytes()? / 1e6 }),
        Measure::MapMemory => Ok(Figures::Memory { megabytes: subject.map_bytes()? / 1e6 }),
        Measure::Rollout => rollout::followed(cluster, subject, on.changes),
        Measure::Restart => {
            subject.kill()?;
            subject.start(&cluster.lab)?;
            Ok(Figures::Writes { entries: subject.first_sync()?.writes })
        }
        Measure::CleanUp => {
            subject.kill()?;
            let start = Instant::now();
            subject.clean_up(&cluster.lab, PATIENCE)?;
            Ok(Figures::Time { millis: start.elapsed().as_secs_f64() * 1e3 })
        }
    }
}

fn route_of(cell: &CellName) -> Result<Route> {
    cell.route.with_context(|| format!("{cell} has no route"))
}

/// Results, which are printed and written as they are found.
struct Record {
    results: Results,
    output: PathBuf,
    /// Number of cells that are to be measured.
    planned: usize,
}

impl Record {
    fn cell(&mut self, name: &CellName, measure: impl FnOnce(&Settings) -> Result<Figures>) -> Result<()> {
        eprint!("[{}/{}] {name} … ", self.results.cells.len() + 1, self.planned);
        io::stderr().flush()?;
        let outcome = match measure(&self.results.settings) {
            Ok(figures) => {
                eprintln!("{}", figures.in_short());
                Outcome::Figures(figures)
            }
            Err(error) => {
                eprintln!("failed: {error:#}");
                Outcome::Failed(format!("{error:#}"))
            }
        };
        self.results.cells.push(Cell { name: name.clone(), outcome });
        self.results.write(&self.output)
    }

    fn all(&mut self, names: &[CellName], outcome: Outcome) -> Result<()> {
        let (verb, reason) = match &outcome {
            Outcome::Failed(reason) => ("failed", reason.as_str()),
            Outcome::Skipped(reason) => ("skipped", reason.as_str()),
            Outcome::Figures(_) => ("found", ""),
        };
        if let Some(first) = names.first() {
            eprintln!("{} cells of {} {verb}: {reason}", names.len(), first.contender);
        }
        let cells = names.iter().map(|name| Cell { name: name.clone(), outcome: outcome.clone() });
        self.results.cells.extend(cells);
        self.results.write(&self.output)
    }

    /// Records the error for those of these cells that have not been measured.
    fn rest(&mut self, names: &[CellName], error: &anyhow::Error) -> Result<()> {
        let missing: Vec<CellName> = names.iter().filter(|name| !self.has(name)).cloned().collect();
        self.all(&missing, Outcome::Failed(format!("{error:#}")))
    }

    fn has(&self, name: &CellName) -> bool {
        self.results.cells.iter().any(|cell| cell.name == *name)
    }
}

fn step<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprint!("{what} … ");
    io::stderr().flush()?;
    let start = Instant::now();
    let done = work().with_context(|| what.to_owned());
    match &done {
        Ok(_) => eprintln!("{:.1} s", start.elapsed().as_secs_f64()),
        Err(_) => eprintln!("failed"),
    }
    done
}

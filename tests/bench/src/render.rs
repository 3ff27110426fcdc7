//! Results as tables for a terminal.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use crate::{
    contender::CONTENDERS,
    plan::{CellName, EXERCISES, Measure, ROUTES, Route},
    results::{Cell, Figures, Outcome, Results, TOO_BUSY},
};

/// File of the tables, beside the file for programs.
pub const FILE: &str = "results.txt";

const NOTHING: &str = "-";
/// Longest line that says why something is missing.
const LONGEST: usize = 200;

pub fn text(results: &Results) -> String {
    let mut parts = vec![conditions(results)];
    parts.extend(ROUTES.into_iter().filter_map(|route| traffic(results, route)));
    parts.extend(flooded(results));
    parts.extend(forwarded(results));
    parts.extend(control_plane(results));
    parts.extend(own(results));
    parts.extend(left_out(results));
    parts.join("\n")
}

/// Returns the text about the machine and the settings.
pub fn conditions(results: &Results) -> String {
    let (machine, settings) = (&results.machine, &results.settings);
    format!(
        "{}, {} cores, {} GiB, Linux {}; kube-proxy {}; {} build.\n\
         {} s for each cell, direct and service by turns of {} ms, {} connections at once; medians, and the middle half as a..b.\n",
        machine.processor,
        machine.cores,
        machine.memory_gib,
        machine.kernel,
        machine.kube_proxy,
        settings.build,
        settings.seconds,
        settings.turn_ms,
        settings.clients,
    )
}

/// Returns a row for each contender and size for which `row` finds something.
fn rows<const N: usize>(
    results: &Results,
    row: impl Fn(&str, usize) -> Option<[String; N]>,
) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for contender in CONTENDERS {
        let is_its = |name: &&CellName| name.contender == contender.name;
        let mut sizes: Vec<usize> =
            results.cells.iter().map(|cell| &cell.name).filter(is_its).map(|name| name.services).collect();
        sizes.sort_unstable();
        sizes.dedup();
        for size in sizes {
            let shown = if size == 0 { NOTHING.to_owned() } else { size.to_string() };
            if let Some(cells) = row(contender.name, size)
                && cells.iter().any(|cell| cell != NOTHING)
            {
                found.push([vec![contender.name.to_owned(), shown], cells.to_vec()].concat());
            }
        }
    }
    found
}

fn table(title: &str, header: &[&str], rows: Vec<Vec<String>>) -> Option<String> {
    if rows.is_empty() {
        return None;
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([&["", "services"], header].concat()).add_rows(rows);
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if index > 0 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    Some(format!("{title}\n{}\n", lines.join("\n")))
}

fn traffic(results: &Results, route: Route) -> Option<String> {
    let rows = rows(results, |contender, size| {
        let figures = |measure| results.figures(measure, Some(route), contender, size);
        let ratio = |measure, with_spread| match figures(measure) {
            Some(Figures::Rates { ratio, .. }) if with_spread => {
                format!("{:.3} {:.2}..{:.2}", ratio.median, ratio.low, ratio.high)
            }
            Some(Figures::Rates { ratio, .. }) => format!("{:.3}", ratio.median),
            _ => NOTHING.to_owned(),
        };
        let (rate, p50, p99) = match figures(Measure::Connect) {
            Some(Figures::Rates { service, .. }) => (
                format!("{:.0}", service.per_second.median),
                format!("{:.0}", service.p50_micros),
                format!("{:.0}", service.p99_micros),
            ),
            _ => (NOTHING.to_owned(), NOTHING.to_owned(), NOTHING.to_owned()),
        };
        let cpu = match figures(Measure::Cpu) {
            Some(Figures::Cpu { busy_at_rest, .. }) if *busy_at_rest > TOO_BUSY => "too busy".to_owned(),
            Some(Figures::Cpu { micros, .. }) => {
                format!("{:.1} {:.0}..{:.0}", micros.median, micros.low, micros.high)
            }
            _ => NOTHING.to_owned(),
        };
        let [connect, request, bulk, datagram] =
            EXERCISES.map(|measure| ratio(measure, measure == Measure::Connect));
        Some([rate, connect, p50, p99, request, bulk, datagram, cpu])
    });
    let title = format!(
        "{}\nconnections a second, and each measure as a part of direct; latencies and processor time of a connection in us",
        route.describe()
    );
    let header = ["connect/s", "connect", "p50", "p99", "request", "bulk", "datagram", "cpu"];
    table(&title, &header, rows)
}

fn flooded(results: &Results) -> Option<String> {
    let rows = rows(results, |contender, size| {
        let route = Some(Route::NodePortLocal);
        let Some(Figures::Flood { syns_per_second, dropped, ratio, p99_micros, held, lost }) =
            results.figures(Measure::Flood, route, contender, size)
        else {
            return None;
        };
        Some([
            format!("{:.1}", syns_per_second / 1e3),
            dropped.map_or_else(|| NOTHING.to_owned(), |dropped| format!("{:.0} %", dropped * 100.0)),
            format!("{:.3} {:.2}..{:.2}", ratio.median, ratio.low, ratio.high),
            format!("{p99_micros:.0}"),
            format!("{lost} of {held}"),
        ])
    });
    let title = "outside to NodePort, endpoints on that node, while SYNs from forged addresses come to another Service\n\
        dropped: SYNs, by the flood limit; lost: established connections of the flooded Service\n\
        connections as a part of direct ones, latency in us";
    table(title, &["1,000 SYN/s", "dropped", "connect", "p99", "lost"], rows)
}

fn forwarded(results: &Results) -> Option<String> {
    let rate_of = |contender: &str, size, route| match results.figures(
        Measure::Forward,
        Some(route),
        contender,
        size,
    ) {
        Some(Figures::Packets { per_second, nanos, .. }) => Some((*per_second, *nanos)),
        _ => None,
    };
    let rows = rows(results, |contender, size| {
        let columns = |route| {
            let Some((per_second, nanos)) = rate_of(contender, size, route) else {
                return [NOTHING; 3].map(str::to_owned);
            };
            let rates = [per_second.median, per_second.low, per_second.high].map(|rate| rate / 1e3);
            // The divisor is the rate that the kernel forwards without translating.
            let part = rate_of("direct", 0, route).map_or_else(
                || NOTHING.to_owned(),
                |(direct, _)| format!("{:.2}", per_second.median / direct.median),
            );
            [format!("{:.0} {:.0}..{:.0}", rates[0], rates[1], rates[2]), part, format!("{nanos:.0}")]
        };
        let [near, near_part, near_nanos] = columns(Route::NodePortLocal);
        let [far, far_part, far_nanos] = columns(Route::NodePortRemote);
        Some([near, near_part, near_nanos, far, far_part, far_nanos])
    });
    let header = ["to a pod here, k/s", "of direct", "ns", "to another node, k/s", "of direct", "ns"];
    let title = format!(
        "packets of {} bytes in {} flows, from outside to NodePort, by one core; making them included, as in `dropped`",
        crate::measure::program::FRAME,
        results.settings.flows
    );
    table(&title, &header, rows)
}

fn shortest(figures: &Figures) -> String {
    match figures {
        Figures::Rates { ratio, .. } => format!("{:.3}", ratio.median),
        Figures::Cpu { micros, .. } => format!("{:.1}", micros.median),
        Figures::Flood { ratio, .. } => format!("{:.3}", ratio.median),
        Figures::Packets { nanos, .. } => format!("{nanos:.0} ns"),
        Figures::Time { millis } => format!("{millis:.0} ms"),
        Figures::Times { millis, .. } => format!("{:.1} ms", millis.median),
        Figures::Changes { cpu_seconds_per_1000, .. } => format!("{cpu_seconds_per_1000:.2} s"),
        Figures::Rest { cpu_millis_per_minute } => format!("{cpu_millis_per_minute:.0} ms"),
        Figures::Memory { megabytes } => format!("{megabytes:.1} MB"),
        Figures::Rollout { behind_millis, .. } => format!("{behind_millis:.1} ms"),
        Figures::Writes { entries } => format!("{entries:.0}"),
    }
}

fn shown(results: &Results, measure: Measure, contender: &str, size: usize) -> String {
    results.figures(measure, None, contender, size).map_or_else(|| NOTHING.to_owned(), shortest)
}

fn control_plane(results: &Results) -> Option<String> {
    let rows = rows(results, |contender, size| {
        let of = |measure| shown(results, measure, contender, size);
        let longest = match results.figures(Measure::Change, None, contender, size) {
            Some(Figures::Times { longest, .. }) => format!("{longest:.1} ms"),
            _ => NOTHING.to_owned(),
        };
        Some([
            of(Measure::Start),
            of(Measure::Change),
            longest,
            of(Measure::ChangesCpu),
            of(Measure::Rest),
            of(Measure::Memory),
            of(Measure::Rollout),
            of(Measure::CleanUp),
        ])
    });
    let header = ["start", "change", "at most", "cpu/1,000", "cpu/minute", "memory", "rollout", "clean-up"];
    let title = format!(
        "control plane, {} endpoints each: start to first connection; API server's word to first connection that follows",
        results.settings.endpoints
    );
    table(&title, &header, rows)
}

/// Returns the table of figures that only proxy-ctl has.
fn own(results: &Results) -> Option<String> {
    let rows = rows(results, |contender, size| {
        let measures = [Measure::FirstSync, Measure::MapMemory, Measure::Restart];
        Some(measures.map(|measure| shown(results, measure, contender, size)))
    });
    let title = "proxy-ctl alone: everything listed to everything programmed; entries that a restart writes";
    table(title, &["first sync", "map memory", "restart writes"], rows)
}

/// Cells that have no figures for the same reason.
struct Missing<'a> {
    what: &'static str,
    reason: &'a str,
    first: &'a CellName,
    count: usize,
}

impl Missing<'_> {
    fn line(&self) -> String {
        let Self { what, reason, first, count } = self;
        let cells = if *count == 1 { first.to_string() } else { format!("{count} cells, as {first}") };
        // The file of results has the whole reason.
        format!("{what}: {cells}: {reason}").chars().take(LONGEST).collect::<String>() + "\n"
    }
}

/// Returns lines about missing figures, one for each reason.
fn left_out(results: &Results) -> Option<String> {
    let mut all: Vec<Missing<'_>> = Vec::new();
    for Cell { name, outcome } in &results.cells {
        let (what, reason) = match outcome {
            Outcome::Figures(_) => continue,
            Outcome::Failed(reason) => ("failed", reason.as_str()),
            Outcome::Skipped(reason) => ("skipped", reason.as_str()),
        };
        match all.iter_mut().find(|missing| (missing.what, missing.reason) == (what, reason)) {
            Some(missing) => missing.count += 1,
            None => all.push(Missing { what, reason, first: name, count: 1 }),
        }
    }
    (!all.is_empty()).then(|| all.iter().map(Missing::line).collect())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{
        machine::Machine,
        results::{Rate, Settings},
        statistics::Spread,
    };

    const WIDTH: usize = 120;

    fn spread(median: f64) -> Spread {
        Spread { median, low: median * 0.9, high: median * 1.1, count: 9 }
    }

    /// Returns results with something in every cell, and with wide numbers.
    pub(crate) fn example() -> Results {
        let rate =
            |per_second| Rate { per_second: spread(per_second), p50_micros: 150.0, p99_micros: 12_345.0 };
        let mut cells = Vec::new();
        for contender in CONTENDERS {
            for name in crate::plan::cells(contender, 10_000, true, &[]) {
                let figures = match name.measure {
                    Measure::Connect | Measure::Request | Measure::Bulk | Measure::Datagram => {
                        Figures::Rates {
                            direct: rate(20_000.0),
                            service: rate(19_800.0),
                            ratio: spread(0.99),
                        }
                    }
                    Measure::Cpu => Figures::Cpu { micros: spread(123.4), busy_at_rest: 0.01 },
                    Measure::Flood => Figures::Flood {
                        syns_per_second: 50_000.0,
                        dropped: Some(0.5),
                        ratio: spread(0.875),
                        p99_micros: 12_345.0,
                        held: 100,
                        lost: 0,
                    },
                    Measure::Forward => {
                        Figures::Packets { per_second: spread(1_234_567.0), nanos: 810.0, lost: 0.0 }
                    }
                    Measure::Start | Measure::FirstSync | Measure::CleanUp => {
                        Figures::Time { millis: 22_500.0 }
                    }
                    Measure::Change => Figures::Times { millis: spread(5_000.0), longest: 9_999.9 },
                    Measure::ChangesCpu => {
                        Figures::Changes { cpu_seconds_per_1000: 12.34, per_second: 200.0 }
                    }
                    Measure::Rest => Figures::Rest { cpu_millis_per_minute: 1_234.0 },
                    Measure::Memory | Measure::MapMemory => Figures::Memory { megabytes: 518.0 },
                    Measure::Rollout => {
                        Figures::Rollout { per_second: 200.0, behind_millis: 9_999.9, writes: Some(2.0) }
                    }
                    Measure::Restart => Figures::Writes { entries: 0.0 },
                };
                cells.push(Cell { name, outcome: Outcome::Figures(figures) });
            }
        }
        let machine = Machine {
            processor: "A processor".into(),
            cores: 2,
            memory_gib: 23.5,
            kernel: "6.18.0".into(),
            kube_proxy: "v1.36.1".into(),
        };
        let settings = Settings {
            build: "release".into(),
            sizes: vec![10_000],
            endpoints: 10,
            seconds: 5.0,
            turn_ms: 25,
            clients: 4,
            pace: 4_000.0,
            rounds: 7,
            changes: 1_000,
            flows: 1_024,
            syns_per_second: 50_000,
        };
        Results { machine, settings, cells }
    }

    #[test]
    fn every_cell_is_in_a_table_that_fits() {
        let results = example();
        let text = text(&results);
        let too_wide: Vec<&str> = text.lines().filter(|line| line.chars().count() > WIDTH).collect();
        assert_eq!(too_wide, [""; 0]);
        let shown = |part: &str| text.matches(part).count();
        let planned = |measures: &[Measure]| {
            results.cells.iter().filter(|cell| measures.contains(&cell.name.measure)).count()
        };
        for (part, measures) in [
            ("0.990 0.89..1.09", &[Measure::Connect][..]),
            ("123.4 111..136", &[Measure::Cpu]),
            ("0.875 0.79..0.96", &[Measure::Flood]),
            ("1235 1111..1358", &[Measure::Forward]),
            ("22500 ms", &[Measure::Start, Measure::FirstSync, Measure::CleanUp]),
            ("12.34 s", &[Measure::ChangesCpu]),
            ("1234 ms", &[Measure::Rest]),
            ("518.0 MB", &[Measure::Memory, Measure::MapMemory]),
        ] {
            assert_eq!(shown(part), planned(measures), "{part}");
        }
    }

    #[test]
    fn what_has_no_figure_is_told_by_name() {
        let mut results = example();
        for cell in &mut results.cells {
            cell.outcome = match (cell.name.contender.as_str(), cell.name.measure) {
                ("ipvs", _) => Outcome::Skipped("no ip_vs".into()),
                ("nftables", Measure::Start) => Outcome::Failed("given up".into()),
                _ => continue,
            };
        }
        let text = text(&results);
        assert!(
            text.contains("\nfailed: start/nftables/10000: given up\nskipped: ")
                && text.ends_with(" cells, as start/ipvs/10000: no ip_vs\n"),
            "{text}"
        );
    }
}

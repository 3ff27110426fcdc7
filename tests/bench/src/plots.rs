//! Results as SVG.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use plotters::{
    coord::Shift,
    prelude::{
        ChartBuilder, Circle, DrawingArea, IntoDrawingArea as _, IntoFont as _, IntoLogRange as _,
        LineSeries, PathElement, RGBColor, Rectangle, SVGBackend, Text,
    },
    style::{BLACK, Color as _, WHITE},
};

use crate::{
    contender::{CONTENDERS, Contender, Kind},
    plan::{Measure, ROUTES, Route},
    results::{Figures, Results, TOO_BUSY},
};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Contender, with the median and the middle half of its measured values.
#[derive(Clone, Debug, PartialEq)]
struct Bar {
    contender: Contender,
    value: f64,
    low: f64,
    high: f64,
}

/// Draws the plots for which there are figures. Returns their files.
pub fn draw(results: &Results, folder: &Path) -> Result<Vec<PathBuf>> {
    let mut drawn = Vec::new();
    for (name, title, measure) in [
        (
            "connections.svg",
            "Connections a second through a Service, as a part of direct ones",
            Measure::Connect,
        ),
        (
            "processor-time.svg",
            "Processor time of the whole machine for a connection, microseconds",
            Measure::Cpu,
        ),
        ("packets.svg", "Packets a second forwarded by one core, millions", Measure::Forward),
    ] {
        let file = folder.join(name);
        let panels = panels(results, measure);
        if panels.is_empty() {
            continue;
        }
        bars(&file, title, &panels).map_err(|error| anyhow!("drawing {}: {error}", file.display()))?;
        drawn.push(file);
    }
    for (name, title, measure) in [
        (
            "change.svg",
            "From an endpoint change to the first connection that follows it, milliseconds",
            Measure::Change,
        ),
        ("start.svg", "From the start of the process to the first connection, milliseconds", Measure::Start),
        ("memory.svg", "Resident memory of the process at its highest, megabytes", Measure::Memory),
        (
            "changes-cpu.svg",
            "The proxy's processor time for 1,000 endpoint changes, seconds",
            Measure::ChangesCpu,
        ),
    ] {
        let file = folder.join(name);
        let lines = lines(results, measure);
        if lines.is_empty() {
            continue;
        }
        growth(&file, title, &lines).map_err(|error| anyhow!("drawing {}: {error}", file.display()))?;
        drawn.push(file);
    }
    Ok(drawn)
}

/// Returns a panel for each route, at the largest size.
fn panels(results: &Results, measure: Measure) -> Vec<(&'static str, Vec<Bar>)> {
    let size = results.settings.sizes.last().copied().unwrap_or(0);
    let bar = |contender: Contender, route: Route| {
        let (spread, scale) = match results.figures(measure, Some(route), contender.name, size)? {
            Figures::Rates { ratio, .. } => (*ratio, 1.0),
            Figures::Cpu { micros, busy_at_rest } if *busy_at_rest <= TOO_BUSY => (*micros, 1.0),
            Figures::Packets { per_second, .. } => (*per_second, 1e-6),
            Figures::Cpu { .. }
            | Figures::Time { .. }
            | Figures::Times { .. }
            | Figures::Changes { .. }
            | Figures::Rest { .. }
            | Figures::Memory { .. }
            | Figures::Rollout { .. }
            | Figures::Writes { .. }
            | Figures::Flood { .. } => return None,
        };
        Some(Bar {
            contender,
            value: spread.median * scale,
            low: spread.low * scale,
            high: spread.high * scale,
        })
    };
    // Figures of a device alone are many times those that are compared.
    let is_shown = |contender: &Contender| !matches!(contender.kind, Kind::Dropped | Kind::SentBack);
    let panel = |route: Route| {
        let shown = CONTENDERS.into_iter().filter(is_shown);
        let bars: Vec<Bar> = shown.filter_map(|contender| bar(contender, route)).collect();
        (route.describe(), bars)
    };
    ROUTES.map(panel).into_iter().filter(|(_, bars)| !bars.is_empty()).collect()
}

/// Returns a line for each contender over the number of Services.
fn lines(results: &Results, measure: Measure) -> Vec<(Contender, Vec<(f64, f64)>)> {
    let point = |contender: Contender, size: usize| {
        let value = match results.figures(measure, None, contender.name, size)? {
            Figures::Time { millis } => *millis,
            Figures::Times { millis, .. } => millis.median,
            Figures::Memory { megabytes } => *megabytes,
            Figures::Changes { cpu_seconds_per_1000, .. } => *cpu_seconds_per_1000,
            Figures::Rates { .. }
            | Figures::Cpu { .. }
            | Figures::Packets { .. }
            | Figures::Rest { .. }
            | Figures::Rollout { .. }
            | Figures::Writes { .. }
            | Figures::Flood { .. } => return None,
        };
        // The scale is logarithmic, so a value must not be zero.
        Some((size as f64, value.max(LEAST)))
    };
    let line = |contender: Contender| {
        let points: Vec<_> =
            results.settings.sizes.iter().filter_map(|size| point(contender, *size)).collect();
        (!points.is_empty()).then_some((contender, points))
    };
    CONTENDERS.into_iter().filter_map(line).collect()
}

const LEAST: f64 = 0.01;
const WIDTH: u32 = 860;
const ROW: i32 = 20;
const NAMES: i32 = 170;
const VALUES: i32 = 70;
const MARGIN: i32 = 16;
const FONT: &str = "sans-serif";

/// Returns a colour: one for proxy-ctl, one for kube-proxy, and one for all others.
fn color(contender: Contender) -> RGBColor {
    match contender.kind {
        Kind::Proxy { proxy, .. } if proxy.is_kube_proxy() => RGBColor(214, 111, 60),
        Kind::Proxy { .. } => RGBColor(44, 110, 178),
        Kind::Direct | Kind::Dropped | Kind::SentBack | Kind::OneRule => RGBColor(130, 130, 130),
    }
}

type Drawn = Result<(), Box<dyn std::error::Error>>;

fn title(area: &Area<'_>, text: &str) -> Drawn {
    area.fill(&WHITE)?;
    area.draw(&Text::new(text.to_owned(), (MARGIN, MARGIN), (FONT, 17).into_font()))?;
    Ok(())
}

fn bars(file: &Path, heading: &str, panels: &[(&str, Vec<Bar>)]) -> Drawn {
    let rows: i32 = panels.iter().map(|(_, bars)| bars.len() as i32 + 2).sum();
    let height = MARGIN * 3 + ROW * rows;
    let area = SVGBackend::new(file, (WIDTH, height.unsigned_abs())).into_drawing_area();
    title(&area, heading)?;
    let largest =
        panels.iter().flat_map(|(_, bars)| bars).map(|bar| bar.high).fold(f64::MIN_POSITIVE, f64::max);
    let room = f64::from(WIDTH as i32 - NAMES - VALUES - 2 * MARGIN);
    let right_of = |value: f64| MARGIN + NAMES + (value / largest * room) as i32;
    let font = || (FONT, 13).into_font();
    let mut top = MARGIN * 3;
    for (name, bars) in panels {
        area.draw(&Text::new((*name).to_owned(), (MARGIN, top), (FONT, 14).into_font()))?;
        top += ROW;
        for bar in bars {
            let middle = top + ROW / 2;
            area.draw(&Text::new(bar.contender.name, (MARGIN + 8, top + 3), font()))?;
            let corners = [(right_of(0.0), top + 3), (right_of(bar.value), top + ROW - 3)];
            area.draw(&Rectangle::new(corners, color(bar.contender).mix(0.8).filled()))?;
            let middle_half = vec![(right_of(bar.low), middle), (right_of(bar.high), middle)];
            area.draw(&PathElement::new(middle_half, BLACK))?;
            let value = (right_of(bar.value.max(bar.high)) + 6, top + 3);
            area.draw(&Text::new(short(bar.value), value, font()))?;
            top += ROW;
        }
        top += ROW;
    }
    area.present()?;
    Ok(())
}

/// Returns the value with about three significant digits.
fn short(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        small if small >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

fn growth(file: &Path, heading: &str, lines: &[(Contender, Vec<(f64, f64)>)]) -> Drawn {
    let area = SVGBackend::new(file, (WIDTH, 440)).into_drawing_area();
    title(&area, heading)?;
    let points = || lines.iter().flat_map(|(_, points)| points);
    let bounds = |of: fn(&(f64, f64)) -> f64| {
        let least = points().map(of).fold(f64::INFINITY, f64::min);
        let most = points().map(of).fold(LEAST, f64::max);
        (least / 1.5..most * 1.5).log_scale()
    };
    let mut chart = ChartBuilder::on(&area)
        .margin(MARGIN)
        .margin_top(3 * MARGIN)
        .margin_right(NAMES)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(bounds(|point| point.0), bounds(|point| point.1))?;
    let number = |value: &f64| if *value >= 1.0 { format!("{value:.0}") } else { format!("{value}") };
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("Services")
        .x_label_formatter(&number)
        .y_label_formatter(&number)
        .draw()?;
    let mut ends = Vec::new();
    for (index, (contender, points)) in lines.iter().enumerate() {
        // Lines of one colour differ in how dark they are.
        let style = color(*contender).mix(1.0 - 0.6 * index as f64 / lines.len() as f64).stroke_width(2);
        chart.draw_series(LineSeries::new(points.iter().copied(), style))?;
        chart.draw_series(points.iter().map(|point| Circle::new(*point, 3, style.filled())))?;
        ends.extend(points.last().map(|last| (chart.backend_coord(last), contender.name)));
    }
    for ((x, y), name) in apart(ends) {
        area.draw(&Text::new(name, (x + 8, y - 7), (FONT, 12).into_font()))?;
    }
    area.present()?;
    Ok(())
}

/// Moves names down so that none is written over another, and returns them from the top.
fn apart(mut names: Vec<((i32, i32), &str)>) -> Vec<((i32, i32), &str)> {
    const LINE: i32 = 14;
    names.sort_unstable_by_key(|((_, y), _)| *y);
    let mut free = i32::MIN;
    for ((_, y), _) in &mut names {
        *y = (*y).max(free);
        free = *y + LINE;
    }
    names
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn every_plot_is_drawn_and_names_all_that_it_shows() {
        let folder = tempfile::tempdir().unwrap();
        let results = crate::render::tests::example();
        let drawn = draw(&results, folder.path()).unwrap();
        assert_eq!(drawn.len(), 7);
        for file in drawn {
            let text = fs::read_to_string(&file).unwrap();
            assert!(text.starts_with("<svg") && text.contains("kube-proxy-nftables"), "{}", file.display());
        }
    }

    #[test]
    fn names_are_not_written_over_another() {
        let names = vec![((5, 30), "c"), ((5, 10), "a"), ((5, 12), "b")];
        assert_eq!(apart(names), [((5, 10), "a"), ((5, 24), "b"), ((5, 38), "c")]);
    }

    #[test]
    fn nothing_is_drawn_of_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut results = crate::render::tests::example();
        results.cells.clear();
        assert_eq!(draw(&results, folder.path()).unwrap(), [""; 0].map(PathBuf::from));
        assert_eq!(short(1_234.5), "1234");
        assert_eq!(short(0.0123), "0.012");
    }
}

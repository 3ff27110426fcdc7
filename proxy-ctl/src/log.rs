//! Logs to stderr. Levels are klog's: `-v 0` tells what an operator needs, each step up tells more.

use tracing_subscriber::filter::{LevelFilter, Targets};

use crate::config::LogFormat;

/// Libraries whose chatter starts at `-v 6` and `-v 8`.
const LIBRARIES: [&str; 8] =
    ["hyper", "hyper_util", "kube", "kube_client", "kube_runtime", "rustls", "tower", "aya"];

/// What is told at `-v verbosity`: info up to 3, debug up to 5, then everything of ours.
fn filter(verbosity: u32) -> Targets {
    let own = match verbosity {
        0..=3 => LevelFilter::INFO,
        4..=5 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let libraries = match verbosity {
        0..=5 => LevelFilter::WARN,
        6..=7 => LevelFilter::INFO,
        8..=9 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let libraries = LIBRARIES.into_iter().map(|library| (library, libraries));
    Targets::new()
        .with_default(libraries_default(verbosity))
        .with_targets(libraries)
        .with_target("proxy_ctl", own)
        .with_target("proxy_ebpf", own)
}

fn libraries_default(verbosity: u32) -> LevelFilter {
    if verbosity >= 10 { LevelFilter::DEBUG } else { LevelFilter::WARN }
}

/// Once for each process; a second call changes nothing.
pub fn start(format: LogFormat, verbosity: u32) {
    use tracing_subscriber::{Layer, fmt, layer::SubscriberExt, util::SubscriberInitExt};
    let layer = fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    let layer = match format {
        LogFormat::Text => layer.with_target(verbosity >= 4).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    // The only error is that one is running already.
    let _ = tracing_subscriber::registry().with(layer.with_filter(filter(verbosity))).try_init();
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use tracing::Level;

    use super::*;

    #[rstest]
    #[case(0, "proxy_ctl::controller", Level::INFO, true)]
    #[case(2, "proxy_ctl::controller", Level::DEBUG, false)]
    #[case(4, "proxy_ctl::controller", Level::DEBUG, true)]
    #[case(4, "kube_client::client", Level::INFO, false)]
    #[case(6, "kube_client::client", Level::INFO, true)]
    #[case(6, "proxy_ctl::model", Level::TRACE, true)]
    #[case(9, "hyper::proto", Level::DEBUG, true)]
    #[case(0, "hyper::proto", Level::WARN, true)]
    fn levels(#[case] verbosity: u32, #[case] target: &str, #[case] level: Level, #[case] told: bool) {
        assert_eq!(filter(verbosity).would_enable(target, &level), told);
    }
}

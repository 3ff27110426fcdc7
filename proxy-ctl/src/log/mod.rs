//! Logs to stderr, as klog writes them: `text` or `json`. Levels are klog's too: `-v 0` tells what an operator needs,
//! each step up tells more; the level can be changed while the process runs.

mod klog;

use std::sync::{
    OnceLock,
    atomic::{AtomicU32, Ordering},
};

use tracing_subscriber::{
    Registry,
    filter::{LevelFilter, Targets},
    reload,
};

use crate::config::LogFormat;

/// Libraries whose chatter starts at `-v 6` and `-v 8`.
const LIBRARIES: [&str; 8] =
    ["hyper", "hyper_util", "kube", "kube_client", "kube_runtime", "rustls", "tower", "aya"];

static FILTER: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();
static VERBOSITY: AtomicU32 = AtomicU32::new(0);

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
    let (filter, handle) = reload::Layer::new(filter(verbosity));
    let layer = fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    let layer = match format {
        LogFormat::Text => layer.event_format(klog::Text).boxed(),
        LogFormat::Json => layer.event_format(klog::Json).boxed(),
    };
    // The only error is that one is running already.
    if tracing_subscriber::registry().with(layer.with_filter(filter)).try_init().is_ok() {
        VERBOSITY.store(verbosity, Ordering::Relaxed);
        let _ = FILTER.set(handle);
    }
}

/// From now on what `-v verbosity` tells is told. False: no log was started.
pub fn set_verbosity(verbosity: u32) -> bool {
    let changed = FILTER.get().is_some_and(|handle| handle.reload(filter(verbosity)).is_ok());
    if changed {
        VERBOSITY.store(verbosity, Ordering::Relaxed);
    }
    changed
}

/// The level in force.
pub fn verbosity() -> u32 {
    VERBOSITY.load(Ordering::Relaxed)
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

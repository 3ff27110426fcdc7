//! Decides which events are logged at each verbosity.

use tracing::{Metadata, Subscriber, level_filters::LevelFilter, subscriber::Interest};
use tracing_subscriber::{
    filter::Targets,
    layer::{Context, Filter},
};

use crate::config::ModuleVerbosity;

/// The libraries that log more from `-v 6` and from `-v 8` on.
const LIBRARIES: [&str; 8] =
    ["hyper", "hyper_util", "kube", "kube_client", "kube_runtime", "rustls", "tower", "aya"];

/// The levels that follow from `-v` and `--vmodule`.
#[derive(Clone, Debug)]
pub(super) struct Levels {
    pub(super) modules: Vec<ModuleVerbosity>,
    targets: Targets,
}

impl Levels {
    pub(super) fn new(verbosity: u32, modules: Vec<ModuleVerbosity>) -> Self {
        Self { modules, targets: targets(verbosity) }
    }

    fn is_logged(&self, metadata: &Metadata<'_>) -> bool {
        let of_module = || {
            let file = metadata.file()?;
            let module = self.modules.iter().find(|module| names(&module.file_pattern, file))?;
            Some(*metadata.level() <= own(module.verbosity))
        };
        self.targets.would_enable(metadata.target(), metadata.level()) || of_module().unwrap_or(false)
    }
}

impl<S: Subscriber> Filter<S> for Levels {
    fn enabled(&self, metadata: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        self.is_logged(metadata)
    }

    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.is_logged(metadata) { Interest::always() } else { Interest::never() }
    }
}

/// Returns the level of our own events: info up to 3, debug up to 5, then everything.
fn own(verbosity: u32) -> LevelFilter {
    match verbosity {
        0..=3 => LevelFilter::INFO,
        4..=5 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    }
}

fn targets(verbosity: u32) -> Targets {
    let libraries = match verbosity {
        0..=5 => LevelFilter::WARN,
        6..=7 => LevelFilter::INFO,
        8..=9 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let others = if verbosity >= 10 { LevelFilter::DEBUG } else { LevelFilter::WARN };
    Targets::new()
        .with_default(others)
        .with_targets(LIBRARIES.into_iter().map(|library| (library, libraries)))
        .with_target("proxy_ctl", own(verbosity))
        .with_target("proxy_ebpf", own(verbosity))
}

/// Returns true if the pattern of `--vmodule` names this source file, without its ending. A pattern
/// with a slash is compared with the end of the path, and any other with the name alone.
fn names(pattern: &str, file: &str) -> bool {
    let path = file.strip_suffix(".rs").unwrap_or(file);
    let folders = pattern.matches('/').count();
    let end = path.rmatch_indices('/').nth(folders).map_or(path, |(slash, _)| &path[slash + 1..]);
    glob(pattern, end)
}

/// Returns true if a pattern matches a text. `*` stands for any text, and `?` for one character.
fn glob(pattern: &str, text: &str) -> bool {
    let mut pattern_rest = pattern.chars();
    match pattern_rest.next() {
        None => text.is_empty(),
        Some('*') => {
            (0..=text.len()).any(|at| text.is_char_boundary(at) && glob(pattern_rest.as_str(), &text[at..]))
        }
        Some(wanted) => {
            let mut rest = text.chars();
            rest.next().is_some_and(|found| {
                (wanted == '?' || wanted == found) && glob(pattern_rest.as_str(), rest.as_str())
            })
        }
    }
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
    fn levels(#[case] verbosity: u32, #[case] target: &str, #[case] level: Level, #[case] logged: bool) {
        assert_eq!(targets(verbosity).would_enable(target, &level), logged);
    }

    #[rstest]
    #[case("watch", "proxy-ctl/src/kubernetes/watch.rs", true)]
    #[case("wat*", "proxy-ctl/src/kubernetes/watch.rs", true)]
    #[case("w?tch", "proxy-ctl/src/kubernetes/watch.rs", true)]
    #[case("watch", "proxy-ctl/src/kubernetes/watches.rs", false)]
    #[case("kubernetes/watch", "proxy-ctl/src/kubernetes/watch.rs", true)]
    #[case("manifests/*", "proxy-ctl/src/kubernetes/watch.rs", false)]
    fn patterns_of_files(#[case] pattern: &str, #[case] file: &str, #[case] named: bool) {
        assert_eq!(names(pattern, file), named);
    }
}

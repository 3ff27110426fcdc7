//! The log in the formats of klog: `text` or `json`. It goes to stderr. If the streams are split,
//! only errors go there, and everything else goes to stdout.
//!
//! Levels are klog's too: `-v 0` logs what an operator needs, and each step up logs more. The level
//! can be changed while the process runs.

#[cfg(test)]
pub(crate) mod capture;
mod klog;
mod levels;

use std::{
    io::{self, Write},
    sync::OnceLock,
};

use tracing::{Level, Metadata};
use tracing_subscriber::{Registry, fmt::MakeWriter, reload};

use self::levels::Levels;
use crate::config::{LogFormat, Logging};

static LEVELS: OnceLock<reload::Handle<Levels, Registry>> = OnceLock::new();

/// Starts the log, once for each process. A second call changes nothing.
pub fn start(logging: &Logging) {
    use tracing_subscriber::{Layer, fmt, layer::SubscriberExt, util::SubscriberInitExt};
    let levels = Levels::new(logging.verbosity, logging.vmodule.clone());
    let (levels, handle) = reload::Layer::new(levels);
    let split = match logging.format {
        LogFormat::Text => logging.text.split_stream,
        LogFormat::Json => logging.json.split_stream,
    };
    let layer = fmt::layer().with_writer(Streams { split }).with_ansi(false).event_format(logging.format);
    // The only possible error is that a log was started already.
    if tracing_subscriber::registry().with(layer.with_filter(levels)).try_init().is_ok() {
        let _ = LEVELS.set(handle);
    }
}

/// Changes `-v`, while `--vmodule` stays in force. Returns false if no log was started.
pub fn set_verbosity(verbosity: u32) -> bool {
    let change = |levels: &mut Levels| *levels = Levels::new(verbosity, std::mem::take(&mut levels.modules));
    LEVELS.get().is_some_and(|handle| handle.modify(change).is_ok())
}

struct Streams {
    /// True if errors go to stderr, and everything else to stdout.
    split: bool,
}

impl<'a> MakeWriter<'a> for Streams {
    type Writer = Box<dyn Write>;

    fn make_writer(&'a self) -> Self::Writer {
        Box::new(io::stderr())
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Self::Writer {
        if self.split && *metadata.level() != Level::ERROR {
            Box::new(io::stdout())
        } else {
            Box::new(io::stderr())
        }
    }
}

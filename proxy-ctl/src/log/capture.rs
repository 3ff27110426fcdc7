//! The log as tests read it.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::{
    Registry,
    fmt::{FormatEvent, format::DefaultFields, layer},
    layer::{Layer as _, SubscriberExt as _},
};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the lines that `work` logs in this thread, up to a level.
pub(crate) fn logged<F>(format: F, level: LevelFilter, work: impl FnOnce()) -> Vec<String>
where
    F: FormatEvent<Registry, DefaultFields> + Send + Sync + 'static,
{
    let log = Log::default();
    let writer = log.clone();
    let layer = layer().event_format(format).with_ansi(false).with_writer(move || writer.clone());
    let layer = layer.with_filter(level);
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), work);
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    text.lines().map(str::to_owned).collect()
}

//! The two formats of klog, which log shippers have parsers for:
//!
//! ```text
//! I1121 10:57:29.123456    4711 run.rs:83] "starting" mode="ebpf"
//! {"ts":1763722649123.456,"caller":"process/run.rs:83","msg":"starting","v":0,"mode":"ebpf"}
//! ```

use std::fmt::{self, Write as _};

use jiff::Zoned;
use serde_json::Value;
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    registry::LookupSpan,
};

use crate::config::LogFormat;

impl<S, N> FormatEvent<S, N> for LogFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let line = match self {
            Self::Text => text,
            Self::Json => json,
        };
        writeln!(writer, "{}", line(event.metadata(), &Fields::of(event), &Zoned::now()))
    }
}

/// The message of an event, and its other fields in their order.
#[derive(Debug, Default)]
struct Fields {
    message: String,
    others: Vec<(&'static str, Value)>,
}

impl Fields {
    fn of(event: &Event<'_>) -> Self {
        let mut fields = Self::default();
        event.record(&mut fields);
        fields
    }

    fn add(&mut self, field: &Field, value: impl Into<Value>) {
        self.others.push((field.name(), value.into()));
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            // Writing to a String cannot fail.
            let _ = write!(self.message, "{value:?}");
        } else {
            self.add(field, format!("{value:?}"));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.message.push_str(value);
        } else {
            self.add(field, value);
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value);
    }
}

/// Returns the name of a field. klog calls an error `err`.
fn key(name: &'static str) -> &'static str {
    if name == "error" { "err" } else { name }
}

/// Returns the path of the source file, shortened to its last `folders` folders.
fn file<'m>(metadata: &Metadata<'m>, folders: usize) -> &'m str {
    let path = metadata.file().unwrap_or_else(|| metadata.target());
    path.rmatch_indices('/').nth(folders).map_or(path, |(slash, _)| &path[slash + 1..])
}

fn text(metadata: &Metadata<'_>, fields: &Fields, now: &Zoned) -> String {
    let letter = match *metadata.level() {
        Level::ERROR => 'E',
        Level::WARN => 'W',
        _ => 'I',
    };
    let mut line = format!(
        "{letter}{} {:>7} {}:{}] {}",
        now.strftime("%m%d %H:%M:%S%.6f"),
        std::process::id(),
        file(metadata, 0),
        metadata.line().unwrap_or(0),
        Value::from(fields.message.as_str()),
    );
    for (name, value) in &fields.others {
        // Text has quotes, numbers and booleans have none, as in JSON.
        let _ = write!(line, " {}={value}", key(name));
    }
    line
}

fn json(metadata: &Metadata<'_>, fields: &Fields, now: &Zoned) -> String {
    let milliseconds = now.timestamp().as_microsecond() as f64 / 1000.0;
    let caller = format!("{}:{}", file(metadata, 1), metadata.line().unwrap_or(0));
    let message = Value::from(fields.message.as_str());
    let mut line = format!(r#"{{"ts":{milliseconds},"caller":{},"msg":{message}"#, Value::from(caller));
    let verbosity = match *metadata.level() {
        // Errors have no verbosity, because they are logged at every verbosity.
        Level::ERROR => None,
        Level::DEBUG => Some(4),
        Level::TRACE => Some(6),
        _ => Some(0),
    };
    if let Some(verbosity) = verbosity {
        let _ = write!(line, r#","v":{verbosity}"#);
    }
    for (name, value) in &fields.others {
        let _ = write!(line, ",{}:{value}", Value::from(key(name)));
    }
    line.push('}');
    line
}

#[cfg(test)]
mod tests {
    use std::io;

    use serde_json::json;
    use tracing::level_filters::LevelFilter;

    use super::*;
    use crate::log::capture::logged;

    fn lines(format: LogFormat) -> Vec<String> {
        logged(format, LevelFilter::TRACE, events)
    }

    fn events() {
        tracing::info!(mode = "ebpf", ports = 3, on = true, "starting \"it\"");
        tracing::warn!(took = ?std::time::Duration::from_millis(5), "slow\nvery");
        tracing::error!(error = %io::Error::other("no"), "failed");
        tracing::debug!("detail");
    }

    #[test]
    fn text_lines_have_the_header_of_klog() {
        let lines = lines(LogFormat::Text);
        let bodies: Vec<&str> = lines.iter().map(|line| line.split_once("] ").unwrap().1).collect();
        assert_eq!(
            bodies,
            [
                r#""starting \"it\"" mode="ebpf" ports=3 on=true"#,
                r#""slow\nvery" took="5ms""#,
                r#""failed" err="no""#,
                r#""detail""#
            ]
        );
        let letters: String = lines.iter().map(|line| line.chars().next().unwrap()).collect();
        assert_eq!(letters, "IWEI");
        // The header has the form `Lmmdd hh:mm:ss.uuuuuu threadid file:line]`.
        let words: Vec<&str> = lines[0].split_whitespace().collect();
        assert!(words[0].len() == 5 && words[1].len() == "10:57:29.123456".len(), "{}", lines[0]);
        assert_eq!(words[2], std::process::id().to_string());
        assert!(words[3].starts_with("klog.rs:") && words[3].ends_with(']'), "{}", lines[0]);
    }

    #[test]
    fn json_lines_have_the_fields_of_klog() {
        let lines = lines(LogFormat::Json);
        let values: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        let first = &values[0];
        assert_eq!((&first["msg"], &first["v"]), (&json!("starting \"it\""), &json!(0)));
        assert_eq!(
            (&first["mode"], &first["ports"], &first["on"]),
            (&json!("ebpf"), &json!(3), &json!(true))
        );
        assert!(first["caller"].as_str().unwrap().starts_with("log/klog.rs:"), "{first}");
        // The time stamp is in milliseconds since the epoch.
        assert!(first["ts"].as_f64().unwrap() > 1.7e12, "{first}");
        assert_eq!((&values[2]["err"], values[2].get("v")), (&json!("no"), None));
        assert_eq!(values[3]["v"], json!(4));
    }
}

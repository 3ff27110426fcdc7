//! The values of all flags as text, given or default, which `/flagz` shows.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    CommandLine, Config,
    fields::field,
    flags::{FLAGS, Flag, Sets, ValueKind},
    url::without_userinfo,
};

impl CommandLine {
    /// Returns the values by the names of the flags. Flags without effect and passwords are left
    /// out.
    pub fn values(&self) -> BTreeMap<String, String> {
        let defaults = Config::default();
        let used = FLAGS.iter().filter(|flag| !matches!(flag.sets, Sets::Nothing));
        used.map(|flag| {
            let value = self.value(flag.name).cloned().or_else(|| default_of(flag, &defaults));
            let text = text(flag.value, value.as_ref());
            let shown = if flag.name == "master" { without_userinfo(&text) } else { text };
            (flag.name.to_owned(), shown)
        })
        .collect()
    }
}

fn default_of(flag: &'static Flag, defaults: &Config) -> Option<Value> {
    if flag.name == "follow-config" {
        return Some(true.into());
    }
    let port = match flag.name {
        "healthz-port" => defaults.healthz_bind_address,
        "metrics-port" => defaults.metrics_bind_address,
        _ => None,
    };
    let fields = || flag.fields().first().and_then(|path| field(path));
    port.map(|address| address.port().into()).or_else(|| fields().map(|field| field.value(defaults)))
}

/// Returns a value as Go writes it.
fn text(kind: ValueKind, value: Option<&Value>) -> String {
    match value {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Bool(on)) => on.to_string(),
        Some(Value::Number(number)) => number
            .as_f64()
            .filter(|_| number.is_f64())
            .map_or_else(|| number.to_string(), |number| number.to_string()),
        Some(Value::Object(gates)) => joined(gates.iter().map(|(gate, on)| format!("{gate}={on}"))),
        Some(Value::Array(modules)) if matches!(kind, ValueKind::Modules) => {
            let text = |module: &Value, name: &str| text(ValueKind::Level, module.get(name));
            joined(
                modules
                    .iter()
                    .map(|module| format!("{}={}", text(module, "filePattern"), text(module, "verbosity"))),
            )
        }
        Some(Value::Array(items)) => {
            format!("[{}]", joined(items.iter().map(|item| text(kind, Some(item)))))
        }
        None | Some(Value::Null) => match kind.placeholder() {
            None => "false".to_owned(),
            Some(_) if matches!(kind, ValueKind::List(_)) => "[]".to_owned(),
            Some(_) => String::new(),
        },
    }
}

fn joined(texts: impl Iterator<Item = String>) -> String {
    texts.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn given_and_default_values() {
        let given = ["--v=4", "--config=/x", "--feature-gates=A=true,B=false", "--vmodule=run=5"];
        let given = given.into_iter().chain(["--nodeport-addresses=10.0.0.0/8,fd00::/8", "--profiling"]);
        let values = CommandLine::parse(given.map(Into::into)).unwrap().values();
        for (flag, value) in [
            ("v", "4"),
            ("config", "/x"),
            ("feature-gates", "A=true,B=false"),
            ("vmodule", "run=5"),
            ("nodeport-addresses", "[10.0.0.0/8,fd00::/8]"),
            ("profiling", "true"),
            ("cleanup", "false"),
            ("follow-config", "true"),
            ("ipvs-exclude-cidrs", "[]"),
            ("kube-api-qps", "5"),
            ("healthz-port", "10256"),
            ("conntrack-tcp-timeout-established", "24h0m0s"),
            ("master", ""),
        ] {
            assert_eq!(values.get(flag).map(String::as_str), Some(value), "--{flag}");
        }
        assert_eq!(values.get("alsologtostderr"), None);
    }

    #[test]
    fn a_password_is_not_shown() {
        let given = ["--master=https://user:secret@10.0.0.1:6443"];
        let values = CommandLine::parse(given.map(Into::into)).unwrap().values();
        assert_eq!(values["master"], "https://xxxxx@10.0.0.1:6443");
    }
}

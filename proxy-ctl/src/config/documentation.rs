//! The generator of docs/configuration.md, which reads the tables of fields and flags.

use std::fmt::Write as _;

use serde_json::Value;

use super::{
    Config, FIELDS, FLAGS, Field, Flag, Group, REMOVED,
    fields::{API_VERSION, KIND},
};
use crate::version::KUBE_PROXY;

/// Returns the whole text. The same tables always give the same text.
pub fn markdown() -> String {
    let mut text = format!(
        "# Configuration\n\nGenerated from the tables in proxy-ctl/src/config (see the end); do not \
         edit.\n\n`proxy-ctl run`, and the same program called `kube-proxy`, takes the flags and the \
         configuration file of kube-proxy {KUBE_PROXY}. `proxy-ctl config` with the same flags shows the \
         configuration that applies, and where each value comes from.\n\n- If `--config` is given, the file is \
         used, and flags for the same settings are ignored with a warning. These flags override the file: \
         `--hostname-override`, `--bpffs`, `--mode-fallback`, and the logging flags (`--vmodule` adds to \
         it).\n- An unknown field and a duplicate field are warnings, as with kube-proxy. Any other mistake \
         ends the program with exit code 1 before anything is touched, with one line for each that names the \
         file, the field or flag, and what is allowed.\n- Zero values (`0s`, `null`, `\"\"`), which kubeadm \
         writes for most fields, mean the default, unless the table says what they mean.\n\n"
    );
    fields(&mut text);
    flags(&mut text);
    differences(&mut text);
    text.push_str(
        "## How this page is made\n\n    cargo test -p proxy-ctl --test configuration -- --ignored write_documentation\n",
    );
    text
}

fn fields(text: &mut String) {
    let _ = write!(
        text,
        "## The file\n\nYAML or JSON, one document, `apiVersion: {API_VERSION}`, `kind: {KIND}`.\n"
    );
    let mut config = Config::default();
    let mut before = "";
    for (index, field) in in_sections().into_iter().enumerate() {
        let section = section(field);
        if index == 0 || section != before {
            let title = if section.is_empty() { "Top level".to_owned() } else { format!("`{section}`") };
            let _ = write!(
                text,
                "\n### {title}\n\n| field | type | default | allowed | meaning | flag |\n|---|---|---|---|---|---|\n"
            );
            before = section;
        }
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} | {} | {} |",
            field.path,
            field.type_name(),
            default(&field.access.write(&mut config)),
            cell(&field.allowed()),
            cell(field.help),
            flags_of(field),
        );
    }
}

/// Returns the fields by section, in the order in which the sections first appear. The top level
/// comes first.
fn in_sections() -> Vec<&'static Field> {
    let mut order: Vec<&str> = vec![""];
    for field in FIELDS {
        if !order.contains(&section(field)) {
            order.push(section(field));
        }
    }
    order.iter().flat_map(|wanted| FIELDS.iter().filter(move |field| section(field) == *wanted)).collect()
}

fn section(field: &Field) -> &'static str {
    field.path.split_once('.').map_or("", |(section, _)| section)
}

fn default(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) if text.is_empty() => "empty".to_owned(),
        Value::String(text) => format!("`{text}`"),
        Value::Array(list) if list.is_empty() => "empty".to_owned(),
        Value::Object(object) if object.is_empty() => "empty".to_owned(),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => format!("`{value}`"),
    }
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn flags_of(field: &Field) -> String {
    let names = FLAGS.iter().filter(|flag| flag.fields().contains(&field.path));
    names.map(|flag| format!("`--{}`", flag.name)).collect::<Vec<_>>().join(", ")
}

fn flags(text: &mut String) {
    text.push_str(
        "\n## Flags\n\n`--flag=value` or `--flag value`; a switch is `--flag` or `--flag=false`. `-` may be written \
         as `_`. Durations are Go's (`1h0m0s`).\n",
    );
    for group in Group::ALL {
        let _ = write!(text, "\n### {}\n\n| flag | sets | meaning |\n|---|---|---|\n", group.heading());
        for flag in FLAGS.iter().filter(|flag| flag.group == group) {
            let _ = writeln!(text, "| {} | {} | {} |", usage(flag), fields_of(flag), meaning(flag));
        }
    }
    text.push_str(
        "\n### Gone\n\nThese are errors that name the replacement.\n\n| flag | instead |\n|---|---|\n",
    );
    for (name, instead) in REMOVED {
        let _ = writeln!(text, "| `--{name}` | {instead} |");
    }
}

fn usage(flag: &Flag) -> String {
    let short = flag.short.map(|letter| format!("`-{letter}`, ")).unwrap_or_default();
    let value = flag.value.placeholder().map(|name| format!("={name}")).unwrap_or_default();
    format!("{short}`--{}{value}`", flag.name)
}

fn fields_of(flag: &'static Flag) -> String {
    flag.fields().iter().map(|field| format!("`{field}`")).collect::<Vec<_>>().join(", ")
}

fn meaning(flag: &'static Flag) -> String {
    match flag.deprecated {
        Some(why) => format!("{} Deprecated: {why}.", cell(flag.description())),
        None => cell(flag.description()),
    }
}

/// The differences from kube-proxy, by topic. `tests/configuration` has a case for each.
pub const DIFFERENCES: &[(&str, &str)] = &[
    (
        "modes",
        "also `ebpf` and `userspace`. An empty mode stays empty in what `--write-config-to` writes, because the mode that \
         is chosen depends on the node; kube-proxy writes `iptables`.",
    ),
    ("our section", "`ebpf` is only here. kube-proxy warns of it and reads on."),
    (
        "node port addresses",
        "`primary`, `localhost`, `all` and networks may stand together, as from 1.37 on.",
    ),
    (
        "served addresses",
        "`--metrics-port=0` is accepted, and an address without a port also beside `--write-config-to`.",
    ),
    (
        "encodings",
        "`contentType` and `acceptContentTypes` are an error if they name an encoding other than JSON and \
         protobuf; kube-proxy takes any text, and then fails when it asks for or sends that encoding.",
    ),
    ("normal forms", "`logging.flushFrequency` is written as a duration, and an empty list as null."),
    (
        "unused values",
        "a value that the mode does not use and that is not allowed is a warning, and is written as its default.",
    ),
    ("split streams", "`logging.options.*.splitStream` of a file has an effect; kube-proxy loses it."),
    (
        "documents",
        "a file is one document, and empty ones beside it are skipped; kube-proxy skips all but the first.",
    ),
    ("empty flags", "an empty `--cluster-cidr=` is as if it were not given."),
    (
        "the old logger",
        "flags that kube-proxy had for it before 1.26 are accepted with a warning that they have no effect.",
    ),
    (
        "feature gates",
        "dependencies between gates are not checked: such gates concern other parts of Kubernetes. Gates of 1.37 that concern \
         kube-proxy are known. Gates of older versions that are always on since are accepted with a warning.",
    ),
    ("hidden metrics", "`showHiddenMetricsForVersion` may also be `1.36`, which is right for 1.37."),
];

fn differences(text: &mut String) {
    text.push_str("\n## Where it differs from kube-proxy\n\n");
    for (item, difference) in DIFFERENCES {
        let _ = writeln!(text, "- {item}: {difference}");
    }
    text.push('\n');
}

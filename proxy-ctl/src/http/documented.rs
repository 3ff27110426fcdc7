//! Tests that docs/metrics.md lists every metric family, with its type and labels, and no other.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::sync::watch;

use super::{exposition::Format, tests::SampleFamilies};
use crate::{
    controller::{Coverage, UnservedPorts},
    events::Recorder,
    http::report::{Metrics, SyncKind},
    kubernetes::SourceState,
    model::{
        desired::ServicePortName,
        mode::{ChosenMode, Mode, RequestedMode},
        objects::{self, ObjectName},
    },
    modes::{self, Effect, UnservedField},
};

const DOCUMENT: &str = include_str!("../../../docs/metrics.md");

/// The type of a metric family, and the keys of its labels.
type MetricFamily = (String, BTreeSet<String>);

const REASONS: &str = "\n## Reasons\n";

fn documented() -> BTreeMap<String, MetricFamily> {
    let (families, _) = DOCUMENT.split_once(REASONS).unwrap();
    let rows = families.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, name, kind, labels, what, _] = cells.as_slice() else { panic!("not four cells: {row}") };
        assert!(!what.is_empty(), "{name} is not explained");
        let labels = labels.split(',').map(|label| label.trim().trim_matches('`').to_owned());
        let labels = labels.filter(|label| !label.is_empty()).collect();
        (name.trim_matches('`').to_owned(), ((*kind).to_owned(), labels))
    })
    .collect()
}

fn key_of(pair: &str) -> &str {
    pair.split('=').next().unwrap_or_default()
}

fn shown(text: &str) -> BTreeMap<String, MetricFamily> {
    let mut families: BTreeMap<String, MetricFamily> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .map(|(name, kind)| (name.to_owned(), (kind.to_owned(), BTreeSet::new())))
        .collect();
    for sample in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, labels) = sample.split_once('{').unwrap_or((sample, ""));
        let name = name.split(' ').next().unwrap_or_default();
        let family = ["_bucket", "_sum", "_count"].into_iter().find_map(|part| name.strip_suffix(part));
        let family = family.filter(|family| families.contains_key(*family)).unwrap_or(name);
        let (_, keys) = families.get_mut(family).unwrap_or_else(|| panic!("{sample} is of no family"));
        let labels = labels.rsplit_once('}').map_or("", |(labels, _)| labels);
        // This splitting works because no label value in this test contains a quote before a comma.
        let labels = labels.split("\",").map(key_of).filter(|key| !key.is_empty() && *key != "le");
        keys.extend(labels.map(str::to_owned));
        keys.insert(String::new());
    }
    for (name, (_, keys)) in &mut families {
        assert!(keys.remove(""), "{name} has no sample: its labels are not known");
    }
    families
}

#[tokio::test]
async fn every_family_is_documented_and_no_other() {
    let state = SourceState::with_samples();
    let unserved = UnservedField { field: "spec.x", effect: Effect::NotServed, instead: "".into() };
    let name = ServicePortName {
        service: ObjectName::new("shop", "web"),
        port: "http".into(),
        protocol: objects::Protocol::Tcp,
        family: objects::IpFamily::Ipv4,
    };
    let unserved_fields = vec![unserved];
    let coverage =
        Coverage { unserved_fields: [(name, unserved_fields.clone())].into(), ..Coverage::default() };
    let (_sender, coverage) = watch::channel(coverage);
    let metrics = Metrics::new(Some(Box::new(SampleFamilies)), state.invalid_objects(), |registry| {
        state.register(registry);
        registry.register_collector(Box::new(UnservedPorts(coverage)));
        Recorder::silent().register(registry.sub_registry_with_prefix("proxy"));
    });
    metrics.refresh().await;
    metrics.own.count_unserved_fields(&unserved_fields, 1);
    metrics.own.chosen(&ChosenMode {
        mode: Mode::Iptables,
        requested: RequestedMode::Ipvs,
        reasons: Vec::new(),
        fallback: None,
    });
    metrics.kube_proxy.synced(objects::IpFamily::Ipv4, SyncKind::Full, Duration::from_millis(1));
    let shown = shown(&Format::Prometheus.write(metrics.encode().unwrap()));
    let documented = documented();
    for (name, family) in &shown {
        assert_eq!(documented.get(name), Some(family), "{name} in docs/metrics.md and as it is");
    }
    let gone: Vec<&String> = documented.keys().filter(|name| !shown.contains_key(*name)).collect();
    assert!(gone.is_empty(), "docs/metrics.md lists what there is not: {gone:?}");
}

#[test]
fn every_reason_is_explained_and_no_other() {
    let (_, rows) = DOCUMENT.split_once(REASONS).unwrap();
    let explained: Vec<(&str, &str)> = rows
        .lines()
        .filter_map(|row| row.strip_prefix("| `"))
        .map(|row| {
            let (name, rest) = row.split_once("` | `").unwrap();
            let (verdict, what) = rest.split_once("` | ").unwrap();
            assert!(what.len() > 10, "{name} is not explained");
            (name, verdict)
        })
        .collect();
    let families = modes::sample_metrics();
    let reasons = families.iter().find(|family| family.name == "proxy_reasons").unwrap();
    let counted = reasons.samples.iter().map(|(labels, _)| (&*labels[0].1, &*labels[1].1));
    assert_eq!(explained, counted.collect::<Vec<_>>());
}

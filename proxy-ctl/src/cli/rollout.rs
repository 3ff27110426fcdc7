//! The command `rollout-status`. With it the chart's hook waits for the DaemonSet that cleans the
//! nodes, because the image has no kubectl.

use std::{io::Write as _, time::Duration};

use anyhow::Context as _;
use serde_json::Value;

use super::{args::RolloutArgs, table};
use crate::kubernetes::{Config, Kubernetes, SourceState};

const BETWEEN_LOOKS: Duration = Duration::from_secs(2);

/// Waits until all pods are ready, and asks as the pod's service account. It has no time limit,
/// because whoever waits for it has one.
pub(super) fn wait(args: &RolloutArgs) -> anyhow::Result<()> {
    let (namespace, name) =
        args.daemon_set.split_once('/').context("the DaemonSet must be named as NAMESPACE/NAME")?;
    let path = format!("/apis/apps/v1/namespaces/{namespace}/daemonsets/{name}");
    let api = Kubernetes::new(Config::default(), "", SourceState::default())?.api();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = api.client();
        let mut told = String::new();
        loop {
            let found = client.request::<Value>(http::Request::get(&path).body(Vec::new())?).await;
            let missing = match &found {
                Ok(daemon_set) => missing(daemon_set),
                Err(error) => Some(error.to_string()),
            };
            let Some(missing) = missing else {
                return table::print(&format!("{}: every pod is ready\n", args.daemon_set))
                    .map_err(Into::into);
            };
            if missing != told {
                // Without stderr there is nowhere to report.
                let _ = writeln!(std::io::stderr(), "waiting for {}: {missing}", args.daemon_set);
                told = missing;
            }
            tokio::time::sleep(BETWEEN_LOOKS).await;
        }
    })
}

/// Returns what is still missing, as `kubectl rollout status` judges it. `None` if all pods are
/// ready.
fn missing(daemon_set: &Value) -> Option<String> {
    let number = |pointer| daemon_set.pointer(pointer).and_then(Value::as_u64).unwrap_or(0);
    if number("/status/observedGeneration") < number("/metadata/generation") {
        return Some("its controller has not seen it yet".to_owned());
    }
    let wanted = number("/status/desiredNumberScheduled");
    let ready = number("/status/numberAvailable").min(number("/status/updatedNumberScheduled"));
    (ready < wanted).then(|| format!("{ready} of {wanted} pods are ready"))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    #[rstest]
    #[case::just_made(json!({}), Some("its controller has not seen it yet"))]
    #[case::an_older_one(json!({"observedGeneration": 1, "desiredNumberScheduled": 0}), Some("its controller has not seen it yet"))]
    #[case::some(
        json!({"observedGeneration": 2, "desiredNumberScheduled": 3, "updatedNumberScheduled": 3, "numberAvailable": 2}),
        Some("2 of 3 pods are ready")
    )]
    #[case::of_an_older_template(
        json!({"observedGeneration": 2, "desiredNumberScheduled": 3, "updatedNumberScheduled": 1, "numberAvailable": 3}),
        Some("1 of 3 pods are ready")
    )]
    #[case::all(
        json!({"observedGeneration": 2, "desiredNumberScheduled": 3, "updatedNumberScheduled": 3, "numberAvailable": 3}),
        None
    )]
    fn every_pod_of_the_newest_template_counts(#[case] status: Value, #[case] expected: Option<&str>) {
        let daemon_set = json!({"metadata": {"generation": 2}, "status": status});
        assert_eq!(missing(&daemon_set).as_deref(), expected);
    }
}

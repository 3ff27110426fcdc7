//! Everything in deploy/, checked by the real kube-apiserver.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use control_plane::{
    ApiServer, Options,
    binaries::{self, Program},
};
use deploy::{api, files, oldest, skip, tools};
use scenario::Skip;
use serde_json::{Value, json};

use super::chart;

/// Longest wait for a new kind to be served.
const SERVED: Duration = Duration::from_secs(120);

/// Starts a server in a folder that is removed with it.
pub(super) fn start() -> Result<(tempfile::TempDir, ApiServer)> {
    if let Some(reason) = binaries::provide(&[Program::Etcd, Program::KubeApiServer])? {
        return Err(Skip(reason).into());
    }
    let folder = tempfile::TempDir::new().context("making a folder")?;
    let options = Options { flags: vec!["--allow-privileged=true".to_owned()], ..Options::default() };
    let server = ApiServer::start_with(folder.path(), options)?;
    Ok((folder, server))
}

/// Returns the Pod that the controller of DaemonSets or Jobs would make. Its checks are stricter
/// than those of the template.
fn pod_of(owner: &Value) -> Value {
    let template = &owner["spec"]["template"];
    let mut metadata = template["metadata"].clone();
    metadata["name"] = "sample".into();
    metadata["namespace"] = owner["metadata"]["namespace"].clone();
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
}

/// Expects the manifests to be right when they are joined, as the README does by
/// `sed … deploy/manifests/*.yaml | kubectl apply -f -`.
pub(super) fn manifests_can_be_joined((): &mut ()) -> Result<()> {
    for (folder, expected) in [("manifests", 4), ("monitoring", 2)] {
        let (joined, apart) = (files::joined(folder)?, files::objects(folder)?);
        ensure!(joined == apart, "{folder}: joined {joined:?}, apart {apart:?}");
        ensure!(joined.len() == expected, "{folder}: {} objects", joined.len());
    }
    Ok(())
}

pub(super) fn the_api_server_accepts_everything((): &mut ()) -> Result<()> {
    let (_folder, server) = start()?;
    let definitions = tools::operator_definitions().map_err(skip)?;
    let mut objects = files::objects("manifests")?;
    objects.extend(files::objects("least-capabilities")?);
    objects.extend(files::objects("cleanup")?);
    objects.extend(files::objects("monitoring")?);
    let everything = [
        "monitoring.podMonitor.enabled=true",
        "monitoring.podMonitor.exposeToAnyone=true",
        "monitoring.prometheusRule.enabled=true",
        "monitoring.dashboard.enabled=true",
    ];
    objects.extend(chart::render(&everything)?);
    objects.extend(chart::render_for(Some(&oldest::version()?), &["privileged=false"])?);
    let pods: Vec<Value> =
        objects.iter().filter(|object| object["spec"]["template"].is_object()).map(pod_of).collect();
    objects.extend(pods);

    server.run(async |client| {
        for definition in &definitions {
            api::store(&client, definition).await?;
        }
        for plural in ["podmonitors", "prometheusrules"] {
            let path = format!("/apis/monitoring.coreos.com/v1/{plural}");
            let start = Instant::now();
            while let Err(error) = api::get(&client, &path).await {
                ensure!(start.elapsed() < SERVED, "{error:#}");
                thread::sleep(Duration::from_millis(50));
            }
        }
        for object in &objects {
            let stored = api::dry_run(&client, object).await?;
            ensure!(stored["metadata"]["name"] == object["metadata"]["name"], "{stored}");
            if object["kind"] == "Pod" {
                // The priority is that of system-node-critical.
                ensure!(stored["spec"]["priority"] == 2_000_001_000, "{stored}");
                // On the host network, the scheduler would want each of these ports to be free on
                // the node.
                let containers = stored["spec"]["containers"].as_array().context("containers")?;
                ensure!(containers.iter().all(|container| container.get("ports").is_none()), "{stored}");
            }
        }
        // This shows that the checks work.
        let mut wrong = files::of_kind(&objects, "DaemonSet")?.clone();
        wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = json!({});
        ensure!(api::dry_run(&client, &wrong).await.is_err(), "a field that does not exist is accepted");
        // Kubernetes itself has the role that the binding names.
        let role = files::of_kind(&objects, "ClusterRoleBinding")?["roleRef"]["name"].clone();
        let role = role.as_str().context("roleRef.name")?;
        api::get(&client, &format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/{role}")).await?;
        Ok(())
    })
}

/// Returns the source file in which kubeadm has its manifests. Go downloads it.
pub(super) fn kubeadm_source() -> Result<String> {
    let module = binaries::module().sources("k8s.io/kubernetes").map_err(skip)?;
    let file = module.join("cmd/kubeadm/app/phases/addons/proxy/manifests.go");
    fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))
}

/// Returns one of kubeadm's own manifests.
pub(super) fn kubeadm(source: &str, constant: &str, values: &[(&str, &str)]) -> Result<Value> {
    let template = source
        .split_once(&format!("{constant} = `"))
        .and_then(|(_, rest)| rest.split_once('`'))
        .with_context(|| format!("kubeadm has no {constant}"))?;
    let text = values.iter().fold(template.0.to_owned(), |text, (name, value)| {
        // kubeadm writes placeholders in both ways.
        text.replace(&format!("{{{{ .{name} }}}}"), value).replace(&format!("{{{{ .{name}}}}}"), value)
    });
    files::documents(&text)?.pop().with_context(|| format!("{constant} is empty"))
}

pub(super) fn kubeadm_is_patched_and_restored((): &mut ()) -> Result<()> {
    let values = [
        ("Image", "registry.k8s.io/kube-proxy:v1.36.1"),
        ("ProxyConfigMap", "kube-proxy"),
        ("ProxyConfigMapKey", "config.conf"),
    ];
    let source = kubeadm_source()?;
    let original = kubeadm(&source, "KubeProxyDaemonSet19", &values)?;
    let (_folder, server) = start()?;
    let change = files::objects("kubeadm/patch.yaml")?.pop().context("patch.yaml is empty")?;
    server.run(async |client| {
        let before = api::store(&client, &original).await?;
        let patched = api::patch(&client, &original, &change).await?;
        let (old, new) = (&before["spec"]["template"]["spec"], &patched["spec"]["template"]["spec"]);
        let container = &new["containers"][0];
        ensure!(new["containers"].as_array().is_some_and(|containers| containers.len() == 1), "{new}");
        ensure!(container["image"] != old["containers"][0]["image"], "{container}");
        for field in ["command", "env", "securityContext", "name"] {
            ensure!(container[field] == old["containers"][0][field], "{field}: {container}");
        }
        for field in ["serviceAccountName", "tolerations", "priorityClassName", "hostNetwork", "nodeSelector"]
        {
            ensure!(new[field] == old[field], "{field}: {new}");
        }
        for (list, key) in [(&old["volumes"], "name"), (&old["containers"][0]["volumeMounts"], "mountPath")] {
            let now = if key == "name" { &new["volumes"] } else { &container["volumeMounts"] };
            for kept in list.as_array().into_iter().flatten() {
                let there = now.as_array().is_some_and(|now| now.contains(kept));
                ensure!(there, "{} is gone: {now}", kept[key]);
            }
        }
        api::dry_run(&client, &pod_of(&patched)).await?;

        // The README says this to keep the pod off all nodes, and to let it on them again.
        let readme = files::text("README.md")?;
        for (value, kept) in [("\"off\"", Value::from("off")), ("null", Value::Null)] {
            let text = format!(
                r#"{{"spec":{{"template":{{"spec":{{"nodeSelector":{{"kube-proxy":{value}}}}}}}}}}}"#
            );
            ensure!(readme.contains(&text), "the README has no {text}");
            let changed = api::patch(&client, &original, &serde_json::from_str(&text)?).await?;
            let selector = &changed["spec"]["template"]["spec"]["nodeSelector"];
            ensure!(selector["kube-proxy"] == kept && selector["kubernetes.io/os"] == "linux", "{selector}");
        }

        // `kubectl rollout undo` sends the former template to replace the current one.
        let mut template = before["spec"]["template"].clone();
        template["$patch"] = "replace".into();
        let restored = api::patch(&client, &original, &json!({"spec": {"template": template}})).await?;
        let (restored, before) = (&restored["spec"], &before["spec"]);
        ensure!(restored["template"] == before["template"], "restored: {restored}");
        // This field is no part of the template, as the README says.
        ensure!(readme.contains("`minReadySeconds` stays"), "the README does not say what stays");
        ensure!(restored["minReadySeconds"] == change["spec"]["minReadySeconds"], "{restored}");
        Ok(())
    })
}

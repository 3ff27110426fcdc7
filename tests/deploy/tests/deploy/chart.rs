//! The chart as helm renders it.

use std::{
    collections::BTreeMap,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use deploy::{files, oldest, skip, tools::Tool};
use serde_json::Value;

/// Value that the chart requires, and that the manifests contain.
pub(super) const SERVER: &str = "apiServer=https://api-server.example:6443";

pub(super) fn render(values: &[&str]) -> Result<Vec<Value>> {
    render_for(None, values)
}

/// Renders the chart for a cluster of this version of Kubernetes.
pub(super) fn render_for(version: Option<&str>, values: &[&str]) -> Result<Vec<Value>> {
    let mut command = Command::new(Tool::Helm.path().map_err(skip)?);
    command.args(["template", "proxy-ctl"]).arg(files::path("chart"));
    command.args(["--namespace", "kube-system", "--set", SERVER]);
    command.args(version.map(|version| format!("--kube-version={version}")));
    for value in values {
        command.args(["--set", value]);
    }
    let output = command.stdin(Stdio::null()).output().context("starting helm")?;
    if !output.status.success() {
        bail!("helm template: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    files::documents(&String::from_utf8_lossy(&output.stdout))
}

fn by_identity(objects: Vec<Value>) -> BTreeMap<(String, String), Value> {
    objects.into_iter().map(|object| (files::identity(&object), object)).collect()
}

/// Splits the objects into those that are installed, and hooks that Helm makes for a moment. The
/// hooks lose the annotations that say when.
pub(super) fn apart(objects: Vec<Value>) -> (Vec<Value>, Vec<Value>) {
    let (mut hooks, installed): (Vec<Value>, Vec<Value>) =
        objects.into_iter().partition(|object| object["metadata"]["annotations"]["helm.sh/hook"].is_string());
    for hook in &mut hooks {
        hook["metadata"].as_object_mut().map(|metadata| metadata.remove("annotations"));
    }
    (installed, hooks)
}

fn same(rendered: Vec<Value>, written: Vec<Value>, what: &str) -> Result<()> {
    let (rendered, written) = (by_identity(rendered), by_identity(written));
    let names = |objects: &BTreeMap<(String, String), Value>| objects.keys().cloned().collect::<Vec<_>>();
    ensure!(
        names(&rendered) == names(&written),
        "{what}: the chart has {:?}, deploy/ has {:?}",
        names(&rendered),
        names(&written)
    );
    for (name, object) in &rendered {
        let differences = json_patch::diff(&written[name], object);
        ensure!(differences.is_empty(), "{what}: from the manifest to the chart's {name:?}: {differences}");
    }
    Ok(())
}

/// Value by which an operator says that anyone may read the metrics.
const EXPOSED: &str = "monitoring.podMonitor.exposeToAnyone=true";

/// Returns the objects as the manifests have them, with one name for any contents of the ConfigMap.
/// The chart's ConfigMap has the hash of its contents in its name, and never changes.
fn under_one_name(mut objects: Vec<Value>) -> Result<Vec<Value>> {
    for object in &mut objects {
        if object["kind"] == "ConfigMap" {
            ensure!(object["immutable"] == true, "{object}");
            object.as_object_mut().map(|map| map.remove("immutable"));
            object["metadata"]["name"] = "proxy-ctl".into();
        } else if object["kind"] == "DaemonSet" {
            *config_map(object)? = "proxy-ctl".into();
        }
    }
    Ok(objects)
}

/// Returns the name of the ConfigMap that the pods of a DaemonSet mount.
fn config_map(daemon_set: &mut Value) -> Result<&mut Value> {
    let volumes = daemon_set.pointer_mut("/spec/template/spec/volumes").and_then(Value::as_array_mut);
    let config = volumes.into_iter().flatten().find(|volume| volume["name"] == "config");
    Ok(&mut config.context("no volume config")?["configMap"]["name"])
}

/// Expects a changed configuration to change the pods' template. Pods are replaced one after the
/// other with whatever changes their template.
pub(super) fn a_changed_configuration_is_a_rolling_update((): &mut ()) -> Result<()> {
    let mounted = |values: &[&str]| {
        let mut objects = render(values)?;
        let map = objects.iter().find(|object| object["kind"] == "ConfigMap").context("no ConfigMap")?;
        let name = map["metadata"]["name"].clone();
        let daemon_set = objects.iter_mut().find(|object| object["kind"] == "DaemonSet");
        let mounted = config_map(daemon_set.context("no DaemonSet")?)?.clone();
        ensure!(mounted == name, "the DaemonSet mounts {mounted}, the ConfigMap is {name}");
        Ok(name)
    };
    let name = mounted(&[])?;
    ensure!(mounted(&[])? == name, "the same contents have two names");
    for changed in ["config.mode=nftables", "apiServer=https://10.0.0.1:6443"] {
        ensure!(mounted(&[changed])? != name, "--set {changed} changes no pod");
    }
    ensure!(mounted(&["image.tag=9.9"])? == name, "the image is no part of the configuration");
    Ok(())
}

pub(super) fn the_chart_renders_the_manifests((): &mut ()) -> Result<()> {
    let (installed, hooks) = apart(render(&[])?);
    let installed = under_one_name(installed)?;
    same(installed, files::objects("manifests")?, "manifests")?;
    let daemon_set = hooks.into_iter().filter(|object| object["kind"] == "DaemonSet").collect();
    same(daemon_set, files::objects("cleanup")?, "cleanup")?;

    let (least, _) = apart(render(&["privileged=false"])?);
    let least = under_one_name(least)?;
    let daemon_set = least.into_iter().filter(|object| object["kind"] == "DaemonSet").collect();
    same(daemon_set, files::objects("least-capabilities")?, "least-capabilities")?;

    let monitored =
        render(&[EXPOSED, "monitoring.podMonitor.enabled=true", "monitoring.prometheusRule.enabled=true"])?;
    let monitoring = monitored
        .into_iter()
        .filter(|object| ["PodMonitor", "PrometheusRule"].iter().any(|kind| object["kind"] == *kind))
        .collect();
    same(monitoring, files::objects("monitoring")?, "monitoring")?;
    Ok(())
}

/// Checks the hooks of an uninstallation. Helm deletes the DaemonSet only after hooks of
/// pre-delete. It waits only for Jobs and Pods, and makes hooks in the order of their weight.
pub(super) fn an_uninstallation_waits_for_clean_nodes((): &mut ()) -> Result<()> {
    let objects = render(&["image.tag=9.9", "image.repository=registry.example/proxy-ctl"])?;
    let mut hooks = Vec::new();
    for object in &objects {
        let annotations = &object["metadata"]["annotations"];
        let Some(hook) = annotations["helm.sh/hook"].as_str() else { continue };
        ensure!(hook == "post-delete", "{object}");
        let policy = &annotations["helm.sh/hook-delete-policy"];
        ensure!(policy == "before-hook-creation,hook-succeeded", "{object}");
        let weight = annotations["helm.sh/hook-weight"].as_str().context("a hook without a weight")?;
        hooks.push((weight.to_owned(), files::identity(object).0));
        for container in ["containers", "initContainers"] {
            let containers = object["spec"]["template"]["spec"][container].as_array();
            for container in containers.into_iter().flatten() {
                ensure!(container["image"] == "registry.example/proxy-ctl:9.9", "{container}");
            }
        }
    }
    hooks.sort();
    let expected =
        [("0", "Role"), ("0", "RoleBinding"), ("0", "ServiceAccount"), ("1", "DaemonSet"), ("2", "Job")];
    let expected = expected.map(|(weight, kind)| (weight.to_owned(), kind.to_owned()));
    ensure!(hooks == expected, "{hooks:?}");

    for (server, host, port) in [
        ("https://10.0.0.1:6443", "10.0.0.1", "6443"),
        ("https://10.0.0.1", "10.0.0.1", "443"),
        ("https://api.example/", "api.example", "443"),
        ("https://[fd00::1]:6443", "fd00::1", "6443"),
        ("https://[fd00::1]", "fd00::1", "443"),
    ] {
        let objects = render(&[&format!("apiServer={server}")])?;
        let job = files::of_kind(&objects, "Job")?;
        let variables = &job["spec"]["template"]["spec"]["containers"][0]["env"];
        let expected = serde_json::json!([
            {"name": "KUBERNETES_SERVICE_HOST", "value": host}, {"name": "KUBERNETES_SERVICE_PORT", "value": port},
        ]);
        ensure!(*variables == expected, "{server}: {variables}");
    }
    Ok(())
}

pub(super) fn wrong_values_are_refused((): &mut ()) -> Result<()> {
    drop(render(&[])?);
    let cases = [
        (&["apiServer="][..], "apiServer is required"),
        (&["apiServer=10.0.0.1:6443"], "apiServer"),
        (&["privilged=false"], "privilged"),
        (&["privileged=sometimes"], "privileged"),
        (&["config.healthzBindAddress=0.0.0.0"], "healthzBindAddress"),
        (&["config.mode=fast"], "mode"),
        (&["config.mode=iptables", "privileged=false"], "privileged: mode iptables"),
        // An operator who asks for a PodMonitor has not said that anyone may read the metrics.
        (&["monitoring.podMonitor.enabled=true"], "monitoring.podMonitor.exposeToAnyone=true"),
    ];
    for (values, named) in cases {
        match render(values) {
            Ok(_) => bail!("--set {values:?} is accepted"),
            Err(error) => ensure!(format!("{error:#}").contains(named), "--set {values:?}: {error:#}"),
        }
    }
    Ok(())
}

pub(super) fn the_nodes_modules_are_mounted_where_they_are_wanted((): &mut ()) -> Result<()> {
    for (values, expected) in [
        (&["config.mode=ipvs"][..], true),
        (&["config.mode=ipvs", "kernelModules=false"], false),
        (&["privileged=false"], false),
    ] {
        let objects = render(values)?;
        let pod = &files::of_kind(&objects, "DaemonSet")?["spec"]["template"]["spec"];
        let names = |list: &Value| {
            list.as_array().is_some_and(|all| all.iter().any(|one| one["name"] == "lib-modules"))
        };
        let found = [&pod["volumes"], &pod["containers"][0]["volumeMounts"]].map(names);
        ensure!(found == [expected; 2], "{values:?}: {found:?}");
    }
    Ok(())
}

pub(super) fn the_chart_follows_its_values((): &mut ()) -> Result<()> {
    let objects = render(&[
        "config.ebpf.socketLoadBalancing=host",
        "config.clientConnection.qps=7",
        "config.healthzBindAddress=127.0.0.1:11256",
        "monitoring.podMonitor.enabled=true",
        EXPOSED,
        "monitoring.dashboard.enabled=true",
        "image.repository=registry.example/proxy-ctl",
        "image.tag=9.9",
    ])?;
    let map = |file: &str| {
        objects.iter().find(|object| object["kind"] == "ConfigMap" && object["data"][file].is_string())
    };
    let config =
        map("config.conf").and_then(|map| map["data"]["config.conf"].as_str()).context("config.conf")?;
    let config = files::documents(config)?.pop().context("config.conf is empty")?;
    ensure!(config["ebpf"]["socketLoadBalancing"] == "host" && config["mode"] == "ebpf", "{config}");
    // A value for one field of a section leaves the chart's other fields of that section alone.
    let connection = &config["clientConnection"];
    ensure!(connection["qps"] == 7 && connection["kubeconfig"].is_string(), "{config}");
    // Metrics that are scraped from outside must be reachable there.
    ensure!(config["metricsBindAddress"] == "0.0.0.0:10249", "{config}");

    let container = &files::of_kind(&objects, "DaemonSet")?["spec"]["template"]["spec"]["containers"][0];
    ensure!(container["image"] == "registry.example/proxy-ctl:9.9", "{container}");
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        ensure!(container[probe]["httpGet"]["port"] == 11256, "{probe}: {container}");
        ensure!(container[probe]["httpGet"]["host"] == "127.0.0.1", "{probe}: {container}");
    }

    let dashboard = map("proxy-ctl.json").context("no dashboard")?;
    ensure!(dashboard["metadata"]["name"] == "proxy-ctl-dashboard", "{dashboard}");
    let text = dashboard["data"]["proxy-ctl.json"].as_str().context("proxy-ctl.json")?;
    let file: Value = serde_json::from_str(&files::text("chart/files/dashboard.json")?)?;
    ensure!(serde_json::from_str::<Value>(text)? == file, "the ConfigMap holds another dashboard");
    Ok(())
}

pub(super) fn the_oldest_kubernetes_knows_every_field((): &mut ()) -> Result<()> {
    let oldest = oldest::version()?;
    let annotation =
        "/spec/template/metadata/annotations/container.apparmor.security.beta.kubernetes.io~1proxy-ctl";
    let field = "/spec/template/spec/containers/0/securityContext/appArmorProfile/type";
    let cases = [
        (oldest.as_str(), Some("unconfined"), None),
        ("1.29.9-vendor.1", Some("unconfined"), None),
        ("1.30.0", None, Some("Unconfined")),
    ];
    for (version, annotated, set) in cases {
        let objects = render_for(Some(version), &["privileged=false", "podAnnotations.own=kept"])?;
        let daemon_set = files::of_kind(&objects, "DaemonSet")?;
        let text = |pointer| daemon_set.pointer(pointer).and_then(Value::as_str);
        let found = (text(annotation), text(field));
        ensure!(found == (annotated, set), "Kubernetes {version}: {found:?}");
        ensure!(text("/spec/template/metadata/annotations/own") == Some("kept"), "{daemon_set}");
        if set.is_some() {
            // This shows that the check works: the field is newer than the version.
            let refused = format!("{:#}", oldest::read(&objects).err().context("a newer field is known")?);
            ensure!(refused.contains("unknown field") && refused.contains("appArmorProfile"), "{refused}");
        } else {
            oldest::read(&objects)?;
        }
    }
    oldest::read(&render_for(Some(&oldest), &[])?)?;
    oldest::read(&files::objects("manifests")?)?;
    ensure!(
        render_for(Some("1.24.17"), &[]).is_err(),
        "an older Kubernetes than the chart is for is accepted"
    );
    Ok(())
}

pub(super) fn versions_are_those_of_the_workspace((): &mut ()) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    let chart = files::documents(&files::text("chart/Chart.yaml")?)?.pop().context("Chart.yaml is empty")?;
    ensure!(chart["version"] == version && chart["appVersion"] == version, "Chart.yaml: {chart}");
    let image = format!("localhost/proxy-ctl:{version}");
    let pointers = ["/spec/template/spec/containers/0/image", "/spec/template/spec/initContainers/0/image"];
    for (file, expected) in
        [("manifests", 1), ("least-capabilities", 2), ("cleanup", 2), ("kubeadm/patch.yaml", 1)]
    {
        let objects = files::objects(file)?;
        let images: Vec<_> = objects
            .iter()
            .flat_map(|object| pointers.map(|pointer| object.pointer(pointer)))
            .flatten()
            .collect();
        ensure!(
            images.len() == expected && images.iter().all(|found| **found == image),
            "{file}: {images:?}"
        );
    }
    Ok(())
}

//! Makes the OCI configuration that containerd would give to runc for a container of a pod.
//!
//! Fields of a pod that this code does not know are errors, because what a manifest says must be
//! what is run.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use super::capabilities;

/// Network namespace and cgroup in which a container runs.
#[derive(Clone, Copy, Debug)]
pub struct Sandbox<'a> {
    pub network_namespace: &'a Path,
    /// cgroup of the container, below the root of the cgroups.
    pub cgroup: &'a str,
}

/// Things that the kubelet prepares for a container.
#[derive(Clone, Debug, Default)]
pub struct Prepared {
    pub environment: BTreeMap<String, String>,
    /// Folder or file of the node for each volume.
    pub volumes: BTreeMap<String, PathBuf>,
}

const POD_FIELDS: &[&str] = &[
    "automountServiceAccountToken",
    "containers",
    "dnsPolicy",
    "enableServiceLinks",
    "hostIPC",
    "hostNetwork",
    "hostPID",
    "initContainers",
    "nodeName",
    "nodeSelector",
    "preemptionPolicy",
    "priority",
    "priorityClassName",
    "restartPolicy",
    "schedulerName",
    "securityContext",
    "serviceAccount",
    "serviceAccountName",
    "terminationGracePeriodSeconds",
    "tolerations",
    "volumes",
];
const CONTAINER_FIELDS: &[&str] = &[
    "args",
    "command",
    "env",
    "image",
    "imagePullPolicy",
    "livenessProbe",
    "name",
    "readinessProbe",
    "resources",
    "securityContext",
    "startupProbe",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "volumeMounts",
];
const SECURITY_FIELDS: &[&str] = &[
    "allowPrivilegeEscalation",
    "appArmorProfile",
    "capabilities",
    "privileged",
    "readOnlyRootFilesystem",
    "seLinuxOptions",
    "seccompProfile",
];
/// Value that the kubelet writes for a pod of priority system-node-critical.
const CRITICAL_OOM_SCORE: i32 = -997;

/// Paths that are masked in a container that is not privileged.
const MASKED: &[&str] = &[
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/sys/firmware",
    "/proc/scsi",
];
const READ_ONLY: &[&str] = &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Returns the OCI configuration of a container. `image` is the image's configuration. The seccomp
/// profile is left out: see [`wants_default_seccomp`].
pub fn configuration(
    pod: &Value,
    container: &Value,
    image: &Value,
    prepared: &Prepared,
    sandbox: Sandbox<'_>,
) -> Result<Value> {
    let (spec, security) = (&pod["spec"], &container["securityContext"]);
    understood(spec, POD_FIELDS, "spec")?;
    understood(container, CONTAINER_FIELDS, "container")?;
    understood(security, SECURITY_FIELDS, "securityContext")?;
    ensure!(spec["hostNetwork"] == true, "a pod with a network of its own");
    ensure!(spec["securityContext"].as_object().is_none_or(serde_json::Map::is_empty), "{spec}");
    let privileged = security["privileged"] == true;
    let (image, environment) = (&image["config"], environment(image, prepared));
    let held = held_capabilities(security)?;
    let mut process = json!({
        "args": arguments(container, image, &environment)?,
        "cwd": image["WorkingDir"].as_str().filter(|folder| !folder.is_empty()).unwrap_or("/"),
        "env": environment.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>(),
        "user": {"uid": 0, "gid": 0},
        "noNewPrivileges": security["allowPrivilegeEscalation"] == false,
        "capabilities": {"bounding": held, "effective": held, "permitted": held},
    });
    // Like containerd with `restrict_oom_score_adj`, this does not lower the value if the machine
    // does not allow it.
    let lowers = capabilities::all()?.iter().any(|name| name == "CAP_SYS_RESOURCE");
    if spec["priorityClassName"] == "system-node-critical" && lowers {
        process["oomScoreAdj"] = CRITICAL_OOM_SCORE.into();
    }
    let mut namespaces =
        vec![json!({"type": "network", "path": sandbox.network_namespace}), json!({"type": "mount"})];
    let own = |field: &str| spec[field] != true;
    namespaces.extend(own("hostPID").then(|| json!({"type": "pid"})));
    namespaces.extend(own("hostIPC").then(|| json!({"type": "ipc"})));
    namespaces.extend((!privileged).then(|| json!({"type": "cgroup"})));
    let (masked, read_only): (&[&str], &[&str]) = if privileged { (&[], &[]) } else { (MASKED, READ_ONLY) };
    Ok(json!({
        "ociVersion": "1.0.2",
        "process": process,
        "root": {"path": "rootfs", "readonly": security["readOnlyRootFilesystem"] == true},
        "mounts": mounts(container, prepared, privileged)?,
        "linux": {
            "namespaces": namespaces,
            "maskedPaths": masked,
            "readonlyPaths": read_only,
            "resources": {"devices": [{"allow": privileged, "access": "rwm"}]},
            "cgroupsPath": sandbox.cgroup,
            "rootfsPropagation": widest_propagation(container)?,
        },
    }))
}

/// Returns true if the container gets the runtime's own seccomp profile. If the profile is not set,
/// there is none, as the kubelet does it unless its `seccompDefault` is on.
pub fn wants_default_seccomp(container: &Value) -> Result<bool> {
    let security = &container["securityContext"];
    match security["seccompProfile"]["type"].as_str() {
        // The runtime ignores the profile of a privileged container.
        _ if security["privileged"] == true => Ok(false),
        None | Some("Unconfined") => Ok(false),
        Some("RuntimeDefault") => Ok(true),
        Some(other) => bail!("a seccomp profile of type {other}"),
    }
}

fn understood(object: &Value, fields: &[&str], what: &str) -> Result<()> {
    let unknown = object.as_object().into_iter().flatten().find(|(name, _)| !fields.contains(&name.as_str()));
    ensure!(unknown.is_none(), "{what}: this test does not know what a kubelet does with {unknown:?}");
    Ok(())
}

fn held_capabilities(security: &Value) -> Result<Vec<String>> {
    if security["privileged"] == true {
        return capabilities::all();
    }
    let asked = &security["capabilities"];
    ensure!(asked["drop"] == json!(["ALL"]), "capabilities that are not dropped");
    let added = asked["add"].as_array().into_iter().flatten().filter_map(Value::as_str);
    Ok(added.map(|name| format!("CAP_{name}")).collect())
}

fn environment(image: &Value, prepared: &Prepared) -> BTreeMap<String, String> {
    let of_image = image["config"]["Env"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let of_image = of_image.filter_map(|pair| pair.split_once('='));
    let mut environment: BTreeMap<String, String> =
        of_image.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    environment.extend(prepared.environment.clone());
    environment
}

/// Returns the arguments of a container's process. `command` replaces the entry point. The image's
/// arguments apply only to its own entry point.
fn arguments(
    container: &Value,
    image: &Value,
    environment: &BTreeMap<String, String>,
) -> Result<Vec<String>> {
    let words = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let (command, arguments) = (words(&container["command"]), words(&container["args"]));
    let all = match (command.is_empty(), arguments.is_empty()) {
        (false, _) => [command, arguments].concat(),
        (true, false) => [words(&image["Entrypoint"]), arguments].concat(),
        (true, true) => [words(&image["Entrypoint"]), words(&image["Cmd"])].concat(),
    };
    ensure!(!all.is_empty(), "nothing to run");
    Ok(all.into_iter().map(|word| expanded(word, environment)).collect())
}

/// Replaces each `$(NAME)` by the value of a variable. Unknown ones stay.
fn expanded(word: String, environment: &BTreeMap<String, String>) -> String {
    environment.iter().fold(word, |word, (name, value)| word.replace(&format!("$({name})"), value))
}

fn mounts(container: &Value, prepared: &Prepared, privileged: bool) -> Result<Vec<Value>> {
    let sys = if privileged { "rw" } else { "ro" };
    let own = |kind: &str, at: &str, options: &[&str]| json!({"destination": at, "type": kind, "source": kind, "options": options});
    let mut mounts = vec![
        own("proc", "/proc", &["nosuid", "noexec", "nodev"]),
        own("tmpfs", "/dev", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        own("tmpfs", "/dev/shm", &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
        own("sysfs", "/sys", &["nosuid", "noexec", "nodev", sys]),
    ];
    for mount in container["volumeMounts"].as_array().into_iter().flatten() {
        understood(mount, &["mountPath", "mountPropagation", "name", "readOnly"], "volumeMounts")?;
        let name = mount["name"].as_str().context("a mount without a volume's name")?;
        let source = prepared.volumes.get(name).with_context(|| format!("there is no volume {name}"))?;
        let access = if mount["readOnly"] == true { "ro" } else { "rw" };
        let options = ["rbind", propagation(mount)?, access];
        mounts.push(json!({
            "destination": mount["mountPath"], "type": "bind", "source": source, "options": options,
        }));
    }
    Ok(mounts)
}

fn propagation(mount: &Value) -> Result<&'static str> {
    Ok(match mount["mountPropagation"].as_str() {
        None | Some("None") => "rprivate",
        Some("HostToContainer") => "rslave",
        Some("Bidirectional") => "rshared",
        Some(other) => bail!("mountPropagation {other}"),
    })
}

/// Returns the widest propagation of the container's mounts. A mount cannot be wider than the one
/// that it is in.
fn widest_propagation(container: &Value) -> Result<&'static str> {
    let mounts = container["volumeMounts"].as_array().into_iter().flatten();
    let found = mounts.map(propagation).collect::<Result<Vec<_>>>()?;
    Ok(["rshared", "rslave"].into_iter().find(|one| found.contains(one)).unwrap_or("rprivate"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_here_understands_is_refused() {
        for (container, field) in [
            (json!({"lifecycle": {"preStop": {}}, "securityContext": {"privileged": true}}), "lifecycle"),
            (json!({"securityContext": {"privileged": true, "runAsUser": 1000}}), "runAsUser"),
            (
                json!({"securityContext": {"privileged": true}, "volumeMounts": [{"name": "no", "mountPath": "/"}]}),
                "volume no",
            ),
            (json!({"securityContext": {}}), "not dropped"),
        ] {
            let pod = json!({"spec": {"hostNetwork": true, "containers": [container]}});
            let sandbox = Sandbox { network_namespace: Path::new("/run/netns/x"), cgroup: "/x" };
            let image = json!({"config": {"Entrypoint": ["/own"]}});
            let found = configuration(&pod, &container, &image, &Prepared::default(), sandbox);
            let error = found.unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }

    #[test]
    fn the_runtimes_seccomp_profile_is_for_those_who_ask_and_are_not_privileged() {
        let of = |security: Value| wants_default_seccomp(&json!({"securityContext": security}));
        assert!(of(json!({"seccompProfile": {"type": "RuntimeDefault"}})).unwrap());
        assert!(!of(json!({"seccompProfile": {"type": "Unconfined"}})).unwrap());
        assert!(!of(json!({})).unwrap());
        assert!(!of(json!({"privileged": true, "seccompProfile": {"type": "RuntimeDefault"}})).unwrap());
        assert!(of(json!({"seccompProfile": {"type": "Localhost"}})).is_err());
    }
}

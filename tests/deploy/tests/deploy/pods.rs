//! Pods of the DaemonSets in deploy/, as API server, kubelet and container runtime make them, on a
//! node of a lab.

use std::{fs, path::Path, process::ExitStatus, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use control_plane::{
    go,
    objects::{self as written, Subject},
};
use deploy::{
    api, files,
    kubelet::Probe,
    oci,
    runc::Container,
    seccomp::{self, Runtime},
    skip,
};
use lab::{
    Agent, Dial, Outcome, Protocol,
    address::{Addresses, FAMILIES, cluster_ip},
    namespace, wait,
};
use nix::sys::signal::Signal;
use scenario::Skip;
use serde_json::{Value, json};

use super::{
    chart,
    cluster::{CLIENT, Cluster, NODE, Pod, SERVER},
    objects,
};

const PORT: u16 = 80;
/// Longest wait for what has no limit of its own, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(120);
/// Milliseconds within which an answer comes, on a busy machine too. A request that was lost is
/// repeated after this time.
const ANSWERED_WITHIN_MS: u64 = 4_000;
/// Milliseconds that are long enough to see that nobody answers.
const SILENCE_MS: u64 = 300;
/// Parameter of the node's network that the proxy sets, to kube-proxy's default of a day.
const ESTABLISHED: (&str, &str) = ("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established", "86400");
/// Default of the kernel for this parameter.
const BEFORE: &str = "432000";

pub(super) fn the_manifests_serve((): &mut ()) -> Result<()> {
    pod_serves(Runtime::Containerd, |cluster| {
        let files = ["manifests/rbac.yaml", "manifests/configmap.yaml", "manifests/daemonset.yaml"];
        install(cluster, cluster.objects(&files)?)
    })
}

pub(super) fn least_capabilities_serve_in_containerd((): &mut ()) -> Result<()> {
    least_capabilities_serve(Runtime::Containerd)
}

pub(super) fn least_capabilities_serve_in_docker((): &mut ()) -> Result<()> {
    least_capabilities_serve(Runtime::Moby)
}

fn least_capabilities_serve(runtime: Runtime) -> Result<()> {
    seccomp::ready().map_err(skip)?;
    pod_serves(runtime, |cluster| {
        let files = ["manifests/rbac.yaml", "manifests/configmap.yaml", "least-capabilities/daemonset.yaml"];
        install(cluster, cluster.objects(&files)?)
    })
}

/// Stores the objects, and returns the DaemonSet with its defaults.
fn install(cluster: &Cluster, mut objects: Vec<Value>) -> Result<Value> {
    for object in &mut objects {
        if object["kind"] == "ConfigMap" {
            change(object)?;
        }
    }
    cluster.store(&objects)?;
    let daemon_set = files::of_kind(&objects, "DaemonSet")?;
    let name = daemon_set["metadata"]["name"].as_str().context("metadata.name")?;
    let path = format!("/apis/apps/v1/namespaces/kube-system/daemonsets/{name}");
    cluster.server.run(async |client| api::get(&client, &path).await)
}

/// Changes the configuration where the test needs another one. The limit of conntrack belongs to
/// the whole machine, and cannot be set from a network namespace.
fn change(config_map: &mut Value) -> Result<()> {
    let text = config_map["data"]["config.conf"].as_str().context("no config.conf")?;
    let mut config = files::documents(text)?.pop().context("config.conf is empty")?;
    config["conntrack"]["maxPerCore"] = 0.into();
    // A failed write is noticed, and tried again, within this time.
    config["iptables"]["syncPeriod"] = "5s".into();
    config_map["data"]["config.conf"] = config.to_string().into();
    Ok(())
}

pub(super) fn kubeadm_patched_serves((): &mut ()) -> Result<()> {
    let source = objects::kubeadm_source()?;
    pod_serves(Runtime::Containerd, |cluster| {
        let url = cluster.server.url();
        // This is how kubeadm indents the configuration in its template.
        let indented = |line: &str| format!("    {line}\n");
        let config: String = KUBEADM_CONFIG.lines().map(indented).collect();
        let values = [
            ("Image", "registry.k8s.io/kube-proxy:v1.36.1"),
            ("ProxyConfigMap", "kube-proxy"),
            ("ProxyConfigMapKey", "config.conf"),
            ("ControlPlaneEndpoint", &url),
            ("ProxyConfig", &config),
        ];
        let daemon_set = objects::kubeadm(&source, "KubeProxyDaemonSet19", &values)?;
        let config_map = objects::kubeadm(&source, "KubeProxyConfigMap19", &values)?;
        let account = written::service_account("kube-system", "kube-proxy");
        let to = Subject::ServiceAccount("kube-system", "kube-proxy");
        let binding = written::cluster_role_binding("kubeadm:node-proxier", "system:node-proxier", to);
        install(cluster, vec![account, binding, config_map, daemon_set.clone()])?;
        let change = files::objects("kubeadm/patch.yaml")?.pop().context("patch.yaml is empty")?;
        cluster.server.run(async |client| api::patch(&client, &daemon_set, &change).await)
    })
}

/// Runs the hook of the chart for which Helm waits. It has its own rights, and an API server
/// address that works while nobody serves cluster IPs.
pub(super) fn the_chart_waits_until_all_nodes_are_clean((): &mut ()) -> Result<()> {
    let mut cluster = Cluster::start()?;
    let server = format!("apiServer={}", cluster.server.url());
    let (_, hooks) = chart::apart(chart::render(&[&server])?);
    let daemon_set = install(&cluster, hooks.clone())?;
    let pod = cluster.pod_of(files::of_kind(&hooks, "Job")?)?;
    let mut pod = cluster.take(pod, Runtime::Containerd)?;
    let container = pod.object["spec"]["containers"][0].clone();
    let mut waiting = cluster.run(&mut pod, &container)?;
    let says = |waiting: &Container, expected: &str| {
        wait::until(expected, PATIENCE, || {
            let log = waiting.log();
            if log.contains(expected) { Ok(Some(())) } else { Err(log) }
        })
    };
    says(&waiting, "its controller has not seen it yet")?;
    // This is how the controller of DaemonSets reports the state.
    let report = |ready: u64| {
        let metadata = &daemon_set["metadata"];
        let reported = json!({
            "apiVersion": "apps/v1", "kind": "DaemonSet",
            "metadata": {"namespace": metadata["namespace"], "name": metadata["name"]},
            "status": {
                "observedGeneration": metadata["generation"], "desiredNumberScheduled": 2, "currentNumberScheduled": 2,
                "updatedNumberScheduled": 2, "numberMisscheduled": 0, "numberReady": ready, "numberAvailable": ready,
            },
        });
        cluster.server.run(async |client| written::apply(&client, &reported).await)
    };
    report(1)?;
    says(&waiting, "1 of 2 pods are ready")?;
    report(2)?;
    let status = waiting.wait(PATIENCE)?;
    ensure!(status.success(), "ended with {status}\n{}", waiting.log());
    Ok(())
}

/// Configuration that kubeadm 1.36.1 makes for a cluster whose pods have 10.244.0.0/16.
const KUBEADM_CONFIG: &str = include_str!("kubeadm-config.conf");

/// Rules that mode nftables of a kube-proxy leaves on the node, in nft's language.
const RULES: &str = "table ip kube-proxy { chain services { ip daddr 10.96.0.80 tcp dport 80 drop; }; }";

/// Stores objects by `install`, which returns the DaemonSet. Its pod is run, used, killed, run
/// again, ended and removed.
fn pod_serves(seccomp: Runtime, install: impl FnOnce(&Cluster) -> Result<Value>) -> Result<()> {
    let mut cluster = Cluster::start()?;
    let node = cluster.lab.netns(NODE)?.namespace.clone();
    let daemon_set = install(&cluster)?;
    let pod = cluster.pod_of(&daemon_set)?;
    let mut pod = cluster.take(pod, seccomp)?;
    let spec = pod.object["spec"].clone();
    let _server = cluster.lab.server(SERVER)?;
    let clients = [cluster.lab.agent(CLIENT)?, cluster.lab.agent(NODE)?];
    let service = cluster_ip(80);
    let has_conntrack = reset(&node)?;
    let has_nft = go::on_path("nft").is_some();
    if has_nft {
        namespace::nft(&node, RULES)?;
    }

    for container in spec["initContainers"].as_array().into_iter().flatten() {
        let mut preparing = cluster.run(&mut pod, container)?;
        let status = preparing.wait(PATIENCE)?;
        ensure!(status.success(), "init container: {status}\n{}", preparing.log());
        if has_conntrack {
            ensure_set(&node).context("the init container")?;
        }
        ensure!(cluster.node.has_bpffs()?, "the init container mounts no bpffs");
    }
    let container = &spec["containers"][0];
    let probed = debug(&mut cluster, container, "probe", &["/usr/local/bin/proxy-ctl", "probe"])?;
    ensure!(probed.contains("ebpf"), "{probed}");
    let mut running = cluster.run(&mut pod, container)?;
    become_ready(&cluster, container, &mut running)?;
    ensure!(cluster.node.has_bpffs()?, "the bpffs is the container's alone");
    let filtered = running.is_filtered()?;
    ensure!(filtered == oci::wants_default_seccomp(container)?, "seccomp: {filtered}");
    if has_conntrack {
        ensure_set(&node)?;
    }
    if has_nft {
        let gone = || ensure_gone(&namespace::nft(&node, "list ruleset")?);
        running.until(PATIENCE, gone).context("the rules of a kube-proxy before")?;
    }
    cluster.add_service("web", service, PORT)?;
    running.until(PATIENCE, || reach(&clients, service)).context("a new Service")?;
    let readme = files::text("README.md")?;
    for (command, told) in [("status", "ebpf"), ("services", "default/web")] {
        ensure!(readme.contains(&format!("-- proxy-ctl {command}\n")), "the README says it otherwise");
        let text = running.exec(&["proxy-ctl", command])?;
        ensure!(text.contains(told), "{command}: {text}");
    }

    what_cannot_write_stops_the_rollout(&cluster, &daemon_set, &mut running)?;
    reach(&clients, service).context("a proxy whose writes fail")?;

    running.signal(Signal::SIGKILL)?;
    let status = running.wait(PATIENCE)?;
    ensure!(!status.success(), "it survives being killed: {status}");
    reach(&clients, service).context("killed")?;
    drop(running);
    let mut running = cluster.run(&mut pod, container)?;
    become_ready(&cluster, container, &mut running).context("after being killed")?;
    reach(&clients, service).context("adopted")?;
    let later = cluster_ip(81);
    cluster.add_service("later", later, PORT)?;
    running.until(PATIENCE, || reach(&clients, later)).context("a Service after being killed")?;

    let mut way_back = WayBack::begin(&mut cluster)?;
    let (status, log) = way_back.clean(&cluster)?;
    ensure!(!status.success() && log.contains("another controller"), "under a controller: {status}\n{log}");
    reach(&clients, later).context("a clean-up under a controller")?;

    running.signal(Signal::SIGTERM)?;
    let grace = spec["terminationGracePeriodSeconds"].as_u64().context("terminationGracePeriodSeconds")?;
    let status = running.wait(Duration::from_secs(grace))?;
    ensure!(status.success(), "ended with {status}\n{}", running.log());
    reach(&clients, service).context("ended")?;
    let log = running.log();
    let complaint = log.lines().filter(|line| !line.contains(SPOILED)).find(|line| {
        let line = line.to_lowercase();
        ["forbidden", "denied", "not permitted"].iter().any(|word| line.contains(word))
    });
    ensure!(complaint.is_none(), "something is not allowed: {complaint:?}\n{log}");
    drop(running);
    way_back.end(&cluster)?;
    ensure!(reach_within(&clients, service, SILENCE_MS).is_err(), "it is still served");
    let unseen = [
        (!has_conntrack).then_some("whether kernel parameters are set, as the kernel has no conntrack"),
        (!has_nft).then_some("whether a former kube-proxy's rules go, as nft is not installed"),
    ];
    let unseen: Vec<&str> = unseen.into_iter().flatten().collect();
    if unseen.is_empty() { Ok(()) } else { Err(Skip(unseen.join("; ")).into()) }
}

/// Words of the log about the pin that [`what_cannot_write_stops_the_rollout`] has spoiled.
const SPOILED: &str = "map settings: bpf(BPF_OBJ_GET) failed: Permission denied";

/// Runs a build whose writes fail, because a folder is in the way of a pin. Its pod is not ready,
/// so a rollout touches no other node. It is not restarted, which would cure nothing.
fn what_cannot_write_stops_the_rollout(
    cluster: &Cluster,
    daemon_set: &Value,
    running: &mut Container,
) -> Result<()> {
    ensure!(daemon_set["spec"]["minReadySeconds"].as_u64() > Some(0), "the first success of a probe counts");
    let container = &daemon_set["spec"]["template"]["spec"]["containers"][0];
    let pin = cluster.node.bpffs().join("proxy-ctl/v1/maps/settings");
    fs::remove_file(&pin).with_context(|| format!("removing {}", pin.display()))?;
    fs::create_dir(&pin).with_context(|| format!("making {}", pin.display()))?;
    let unready = || match ask(cluster, container, "readinessProbe")? {
        Err(error) if error.to_string().contains("503") => Ok(()),
        answer => bail!("not refused: {answer:?}"),
    };
    running.until(PATIENCE, unready).context("a proxy whose writes fail")?;
    ask(cluster, container, "livenessProbe")?.context("a proxy whose writes fail is restarted")?;
    fs::remove_dir(&pin).with_context(|| format!("removing {}", pin.display()))?;
    running
        .until(PATIENCE, || ask(cluster, container, "readinessProbe")?)
        .context("a proxy that can write again")
}

/// Asks a probe once, at each address of the node.
fn ask(cluster: &Cluster, container: &Value, probe: &str) -> Result<Result<()>> {
    let network = &cluster.lab.netns(NODE)?.namespace;
    let mut probes = Vec::new();
    for address in cluster.addresses()?.both() {
        probes.extend(Probe::of(container, probe, address)?);
    }
    ensure!(!probes.is_empty(), "there is no {probe}");
    Ok(probes.iter().try_for_each(|probe| namespace::within(network, || probe.ask())))
}

/// Pod of deploy/cleanup.
struct WayBack {
    pod: Pod,
}

impl WayBack {
    /// Installs deploy/cleanup as the README says.
    fn begin(cluster: &mut Cluster) -> Result<Self> {
        let readme = files::text("README.md")?;
        ensure!(readme.contains("kubectl apply -f deploy/cleanup\n"), "the README says it otherwise");
        let daemon_set = install(cluster, files::objects("cleanup")?)?;
        let pod = cluster.pod_of(&daemon_set)?;
        Ok(Self { pod: cluster.take(pod, Runtime::Containerd)? })
    }

    /// Runs the init container once, where the kubelet would try again.
    fn clean(&mut self, cluster: &Cluster) -> Result<(ExitStatus, String)> {
        let container = self.pod.object["spec"]["initContainers"][0].clone();
        let mut cleaning = cluster.run(&mut self.pod, &container)?;
        Ok((cleaning.wait(PATIENCE)?, cleaning.log()))
    }

    /// Expects the pod to clean up, to stay, and to end.
    fn end(mut self, cluster: &Cluster) -> Result<()> {
        let (status, log) = self.clean(cluster)?;
        ensure!(status.success(), "{status}\n{log}");
        let pins = cluster.node.bpffs().join("proxy-ctl");
        ensure!(!pins.exists(), "{} is left", pins.display());
        let container = self.pod.object["spec"]["containers"][0].clone();
        let mut staying = cluster.run(&mut self.pod, &container)?;
        wait::until("the container that stays", PATIENCE, || {
            let log = staying.log();
            if log.contains("Nothing of proxy-ctl") { Ok(Some(())) } else { Err(log) }
        })?;
        staying.signal(Signal::SIGTERM)?;
        let status = staying.wait(PATIENCE)?;
        ensure!(status.success(), "ended with {status}\n{}", staying.log());
        Ok(())
    }
}

/// Runs `kubectl debug node/… --profile=sysadmin -- …`, and returns its output.
fn debug(cluster: &mut Cluster, proxy: &Value, name: &str, command: &[&str]) -> Result<String> {
    let readme = files::text("README.md")?;
    ensure!(readme.contains(&command.join(" ")), "the README says it otherwise");
    let pod = cluster.admit(&json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("node-debugger-{name}"), "namespace": "kube-system"},
        "spec": {
            "nodeName": NODE, "hostNetwork": true, "hostPID": true, "hostIPC": true, "restartPolicy": "Never",
            "tolerations": [{"operator": "Exists"}],
            "volumes": [{"name": "host-root", "hostPath": {"path": "/"}}],
            "containers": [{
                "name": "debugger", "image": proxy["image"], "command": command,
                "securityContext": {"privileged": true},
                "volumeMounts": [{"name": "host-root", "mountPath": "/host"}],
            }],
        },
    }))?;
    let container = pod["spec"]["containers"][0].clone();
    let mut pod: Pod = cluster.take(pod, Runtime::Containerd)?;
    let mut running = cluster.run(&mut pod, &container)?;
    let status = running.wait(PATIENCE)?;
    ensure!(status.success(), "{command:?}: {status}\n{}", running.log());
    Ok(running.log())
}

/// Asks the container's probes as the kubelet does. The startup probe must succeed before the
/// others are asked.
fn become_ready(cluster: &Cluster, container: &Value, running: &mut Container) -> Result<()> {
    let network = &cluster.lab.netns(NODE)?.namespace;
    let mut asked = 0;
    for name in ["startupProbe", "livenessProbe", "readinessProbe"] {
        for address in cluster.addresses()?.both() {
            let Some(probe) = Probe::of(container, name, address)? else { continue };
            running
                .until(probe.patience.min(PATIENCE), || namespace::within(network, || probe.ask()))
                .with_context(|| name.to_owned())?;
            asked += 1;
        }
    }
    ensure!(asked > 0, "there are no probes");
    Ok(())
}

/// Expects the Service to be reached from a pod and from the node, by both protocols and both
/// families.
fn reach(clients: &[Agent], service: Addresses) -> Result<()> {
    reach_within(clients, service, ANSWERED_WITHIN_MS)
}

/// Expects each answer within this many milliseconds.
fn reach_within(clients: &[Agent], service: Addresses, timeout_ms: u64) -> Result<()> {
    for client in clients {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            for family in FAMILIES {
                let target = (service.of(family), PORT).into();
                let outcomes = client.dial(&Dial::new(protocol, target).timeout_ms(timeout_ms))?;
                let answered = matches!(&outcomes[..], [Outcome::Answered(answer)] if answer.by == SERVER);
                if !answered {
                    bail!("{} -> {target} {protocol}: {outcomes:?}", client.name());
                }
            }
        }
    }
    Ok(())
}

/// Gives the kernel parameter its own value again. Returns false if the kernel does not have it,
/// because the module is not loaded.
fn reset(network: &str) -> Result<bool> {
    namespace::within(network, || {
        let is_there = Path::new(ESTABLISHED.0).exists();
        if is_there {
            fs::write(ESTABLISHED.0, BEFORE).context("setting a kernel parameter")?;
        }
        Ok(is_there)
    })
}

fn ensure_set(network: &str) -> Result<()> {
    // /readyz says that everything is programmed. That happens after the parameters are set.
    wait::until(ESTABLISHED.0, PATIENCE, || {
        let read = || fs::read_to_string(ESTABLISHED.0).context("reading a kernel parameter");
        let found = namespace::within(network, read).map_err(|error| format!("{error:#}"))?;
        if found.trim() == ESTABLISHED.1 { Ok(Some(())) } else { Err(format!("it is {found}")) }
    })
}

fn ensure_gone(rules: &str) -> Result<()> {
    ensure!(!rules.contains("chain services"), "still there: {rules}");
    Ok(())
}

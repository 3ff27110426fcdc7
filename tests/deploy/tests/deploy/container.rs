//! The image's root file system under runc, with what a DaemonSet of deploy/ gives its container, on a node of a lab.

use std::{
    env, fs,
    fs::File,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use deploy::{files, image::Archive};
use lab::{
    Dial, Lab, Objects, Outcome as Dialled, Place, Protocol,
    address::{FAMILIES, cluster_ip},
    cluster::{PodProcesses, SERVER_PORT},
    namespace,
    objects::{Endpoint, Service},
};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};
use serde_json::{Value, json};

use super::Outcome;

const NODE: &str = "node1";
const PORT: u16 = 80;
/// Longest wait for a start or an end, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(120);
/// Longest wait for a piece of an answer; then it is asked again.
const ANSWER: Duration = Duration::from_secs(5);

/// By number.
const CAPABILITIES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// What `privileged` gives: all that this machine has to give.
fn all_capabilities() -> Result<Vec<&'static str>> {
    let status = fs::read_to_string("/proc/self/status").context("reading /proc/self/status")?;
    let held = status.lines().find_map(|line| line.strip_prefix("CapBnd:")).context("no CapBnd")?;
    let held = u64::from_str_radix(held.trim(), 16).context("CapBnd")?;
    Ok(CAPABILITIES
        .into_iter()
        .enumerate()
        .filter(|(bit, _)| held & (1 << bit) != 0)
        .map(|(_, name)| name)
        .collect())
}

/// A container of the image; deleted with this.
struct Container {
    id: String,
    runc: Child,
    log: PathBuf,
}

impl Container {
    fn start(bundle: &Path, id: &str, config: &Value) -> Result<Self> {
        fs::write(bundle.join("config.json"), serde_json::to_vec(config)?).context("writing config.json")?;
        let log = bundle.join("log");
        let output = File::options().create(true).append(true).open(&log).context("opening the log")?;
        let mut command = Command::new("runc");
        command.args(["run", "--bundle"]).arg(bundle).arg(id).stdin(Stdio::null());
        let runc = command.stdout(output.try_clone()?).stderr(output).spawn().context("starting runc")?;
        Ok(Self { id: id.to_owned(), runc, log })
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// As the kubelet does; the exit code.
    fn stop(&mut self) -> Result<Option<i32>> {
        let killed =
            Command::new("runc").args(["kill", &self.id, "TERM"]).status().context("starting runc")?;
        ensure!(killed.success(), "runc kill: {killed}\n{}", self.log());
        self.wait()
    }

    /// Waits for its end; the exit code.
    fn wait(&mut self) -> Result<Option<i32>> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.runc.try_wait().context("waiting for runc")? {
                return Ok(status.code());
            }
            ensure!(start.elapsed() < PATIENCE, "it does not end\n{}", self.log());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until `/healthz` answers 200.
    fn wait_until_healthy(&mut self, node: &Place) -> Result<()> {
        let start = Instant::now();
        loop {
            let answer = namespace::within(&node.namespace, || get("127.0.0.1:10256", "/healthz"));
            if answer.as_ref().is_ok_and(|answer| answer.starts_with("HTTP/1.1 200")) {
                return Ok(());
            }
            let ended = self.runc.try_wait().context("waiting for runc")?;
            if ended.is_some() || start.elapsed() > PATIENCE {
                bail!("not healthy ({ended:?}): {answer:?}\n{}", self.log());
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let mut delete = Command::new("runc");
        // An error means that it is gone already.
        let _ = delete.args(["delete", "--force", &self.id]).stderr(Stdio::null()).status();
        let _ = self.runc.kill();
        let _ = self.runc.wait();
    }
}

fn get(address: &str, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(ANSWER))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// What the kubelet and the container runtime make of a container of the DaemonSet, where the node is one of the lab.
struct Translation<'a> {
    lab: &'a Lab,
    node: &'a Place,
    /// Holds the configuration and the manifests.
    folder: &'a Path,
    /// `/sys/fs/bpf` of the node.
    bpffs: &'a Path,
}

impl Translation<'_> {
    fn config(&self, container: &Value) -> Result<Value> {
        let security = &container["securityContext"];
        let privileged = security["privileged"] == true;
        let added =
            security["capabilities"]["add"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let held: Vec<String> = if privileged {
            all_capabilities()?.iter().map(|name| format!("CAP_{name}")).collect()
        } else {
            ensure!(security["capabilities"]["drop"] == json!(["ALL"]), "capabilities that are not dropped");
            added.map(|name| format!("CAP_{name}")).collect()
        };
        let mut namespaces = vec![
            json!({"type": "network", "path": namespace::path(&self.node.namespace)}),
            json!({"type": "mount"}),
            json!({"type": "pid"}),
            json!({"type": "ipc"}),
            json!({"type": "uts"}),
        ];
        if !privileged {
            namespaces.push(json!({"type": "cgroup"}));
        }
        // As containerd does: a mount cannot be wider than what it is in.
        let mut propagations = Vec::new();
        for mount in container["volumeMounts"].as_array().into_iter().flatten() {
            propagations.push(propagation(mount)?);
        }
        let widest =
            ["rshared", "rslave"].into_iter().find(|one| propagations.contains(one)).unwrap_or("rprivate");
        // As a node's kernel parameters look to a container.
        let read_only: &[&str] =
            if privileged { &[] } else { &["/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"] };
        Ok(json!({
            "ociVersion": "1.0.2",
            "process": {
                "args": command(container)?,
                "cwd": "/",
                "env": ["PATH=/usr/local/bin", format!("NODE_NAME={NODE}")],
                "user": {"uid": 0, "gid": 0},
                "noNewPrivileges": security["allowPrivilegeEscalation"] == false,
                "capabilities": {"bounding": held, "effective": held, "permitted": held},
            },
            "root": {"path": "rootfs", "readonly": security["readOnlyRootFilesystem"] == true},
            "mounts": self.mounts(container, privileged)?,
            "linux": {
                "namespaces": namespaces,
                "readonlyPaths": read_only,
                "cgroupsPath": format!("/{}-container", self.lab.name()),
                "rootfsPropagation": widest,
            },
        }))
    }

    fn mounts(&self, container: &Value, privileged: bool) -> Result<Vec<Value>> {
        let own = |kind: &str, at: &str, options: &[&str]| json!({"destination": at, "type": kind, "source": kind, "options": options});
        let sys: &[&str] = if privileged {
            &["nosuid", "noexec", "nodev", "rw"]
        } else {
            &["nosuid", "noexec", "nodev", "ro"]
        };
        let mut mounts = vec![
            own("proc", "/proc", &["nosuid", "noexec", "nodev"]),
            own("tmpfs", "/dev", &["nosuid", "mode=755"]),
            own("sysfs", "/sys", sys),
            json!({"destination": "/manifests", "type": "bind", "source": self.folder.join("manifests"), "options": ["rbind", "ro"]}),
        ];
        for mount in container["volumeMounts"].as_array().into_iter().flatten() {
            let at = mount["mountPath"].as_str().context("mountPath")?;
            let source = match mount["name"].as_str().context("name")? {
                "config" => self.folder.join("config"),
                // These two are what the programs of this node see.
                "bpffs" => self.bpffs.to_owned(),
                "cgroup" => self.node.cgroup.clone(),
                "xtables-lock" => self.folder.join("xtables.lock"),
                "lib-modules" => self.folder.join("modules"),
                "run" => {
                    mounts.push(own("tmpfs", at, &["nosuid", "nodev"]));
                    continue;
                }
                other => bail!("volume {other} is new here"),
            };
            let access = if mount["readOnly"] == true { "ro" } else { "rw" };
            let propagation = propagation(mount)?;
            mounts.push(
                json!({"destination": at, "type": "bind", "source": source, "options": ["rbind", propagation, access]}),
            );
        }
        Ok(mounts)
    }
}

fn propagation(mount: &Value) -> Result<&'static str> {
    Ok(match mount["mountPropagation"].as_str() {
        None | Some("None") => "rprivate",
        Some("HostToContainer") => "rslave",
        Some("Bidirectional") => "rshared",
        Some(other) => bail!("mountPropagation {other}"),
    })
}

/// A folder whose mounts are those of the containers too, without a bpffs yet.
struct SharedFolder(PathBuf);

impl SharedFolder {
    fn new(path: PathBuf) -> Result<Self> {
        fs::create_dir(&path).with_context(|| format!("making {}", path.display()))?;
        let nothing = None::<&str>;
        mount(Some(&path), &path, nothing, MsFlags::MS_BIND, nothing)
            .context("mounting a folder on itself")?;
        let shared = Self(path);
        mount(nothing, &shared.0, nothing, MsFlags::MS_SHARED, nothing).context("sharing a mount")?;
        Ok(shared)
    }

    fn is_bpffs(&self) -> Result<bool> {
        Ok(statfs(&self.0).context("looking at a file system")?.filesystem_type() == BPF_FS_MAGIC)
    }
}

impl Drop for SharedFolder {
    fn drop(&mut self) {
        // The bpffs, and the folder itself; an error means that nothing is mounted any more.
        for _ in 0..2 {
            let _ = umount2(&self.0, MntFlags::MNT_DETACH);
        }
    }
}

/// The command of a container of the DaemonSet, with a folder of manifests in the API server's place.
fn command(container: &Value) -> Result<Vec<String>> {
    let words = container["command"].as_array().context("command")?.iter().filter_map(Value::as_str);
    let words = words.map(|word| word.replace("$(NODE_NAME)", NODE));
    Ok(words.chain(["--manifests=/manifests".to_owned()]).collect())
}

pub(super) fn the_image_serves() -> Result<Outcome> {
    if let Ok(error) = env::var("PROXY_BROKEN_IMAGE") {
        bail!("the image cannot be built: {error}");
    }
    if !nix::unistd::geteuid().is_root() {
        return Ok(Outcome::Skipped("containers need root".to_owned()));
    }
    if let Ok(reason) = env::var("PROXY_NO_IMAGE") {
        return Ok(Outcome::Skipped(format!("there is no image: {reason}")));
    }
    let Some(archive) = env::var_os("PROXY_IMAGE") else {
        return Ok(Outcome::Skipped(
            "PROXY_IMAGE names no archive: cargo xtask test --suite deploy".to_owned(),
        ));
    };
    let archive = Archive::open(Path::new(&archive))?;
    ensure!(
        archive.config["config"]["Entrypoint"] == json!(["/usr/local/bin/proxy-ctl"]),
        "{}",
        archive.config
    );

    let mut lab = Lab::new()?;
    for name in ["client-1", "web-1"] {
        lab.add_pod(1, name, PodProcesses::InNodeCgroup)?;
    }
    let bundle = lab.directory().join("bundle");
    fs::create_dir_all(&bundle).context("making the bundle")?;
    archive.unpack(&bundle.join("rootfs"))?;
    let (node, folder) = (lab.place(NODE)?, lab.directory());
    for name in ["config", "manifests", "modules"] {
        fs::create_dir(folder.join(name)).with_context(|| format!("making {name}"))?;
    }
    File::create(folder.join("xtables.lock")).context("making xtables.lock")?;
    let config = files::objects("manifests")?;
    let config =
        files::of_kind(&config, "ConfigMap")?["data"]["config.conf"].as_str().context("no config.conf")?;
    let mut config = files::documents(config)?.pop().context("config.conf is empty")?;
    // These belong to the whole machine.
    config["conntrack"] =
        json!({"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"});
    fs::write(folder.join("config/config.conf"), config.to_string()).context("writing config.conf")?;

    let mut objects = Objects::default();
    objects.set_node(NODE, node.addresses, ["10.244.1.0/24".to_owned(), "fd00:10:244:1::/64".to_owned()]);
    let service = Service::new("web", cluster_ip(1), PORT, SERVER_PORT, None);
    objects.set_service(&service, &[Endpoint::ready(lab.place("web-1")?.addresses, 1)]);
    objects.write_to(&folder.join("manifests"))?;
    let _server = lab.server("web-1")?;
    let clients = [lab.agent("client-1")?, lab.agent(NODE)?];
    let reach = |when: &str| -> Result<()> {
        for client in &clients {
            for (protocol, family) in [Protocol::Tcp, Protocol::Udp]
                .into_iter()
                .flat_map(|protocol| FAMILIES.map(|family| (protocol, family)))
            {
                let target = (cluster_ip(1).of(family), PORT).into();
                let outcomes = client.dial(&Dial::new(protocol, target))?;
                let answered = matches!(&outcomes[..], [Dialled::Answered(answer)] if answer.by == "web-1");
                ensure!(answered, "{when}: {} -> {target} {protocol}: {outcomes:?}", client.name());
            }
        }
        Ok(())
    };

    for (number, variant) in
        ["least-capabilities/daemonset.yaml", "manifests/daemonset.yaml"].iter().enumerate()
    {
        // Goes with all that is pinned there before the next one comes.
        let bpffs = SharedFolder::new(folder.join(format!("sys-fs-bpf-{number}")))?;
        let objects = files::objects(variant)?;
        let pod = &files::of_kind(&objects, "DaemonSet")?["spec"]["template"]["spec"];
        let translation = Translation { lab: &lab, node, folder, bpffs: &bpffs.0 };
        for container in pod["initContainers"].as_array().into_iter().flatten() {
            let config = translation.config(container)?;
            let mut preparing = Container::start(&bundle, &format!("{}-init", lab.name()), &config)?;
            let code = preparing.wait()?;
            ensure!(code == Some(0), "{variant}, init container: {code:?}\n{}", preparing.log());
        }
        let config = translation.config(&pod["containers"][0])?;
        let id = format!("{}-proxy", lab.name());
        let mut running = Container::start(&bundle, &id, &config)?;
        running.wait_until_healthy(node).context(variant)?;
        ensure!(bpffs.is_bpffs()?, "{variant}: the bpffs is the container's alone");
        reach(variant)?;
        let code = running.stop()?;
        ensure!(code == Some(0), "{variant}: ended with {code:?}\n{}", running.log());
        drop(running);
        reach(&format!("{variant}, stopped"))?;
        let mut again = Container::start(&bundle, &id, &config)?;
        again.wait_until_healthy(node).context(variant)?;
        reach(&format!("{variant}, started again"))?;
        ensure!(again.stop()? == Some(0), "{variant}: {}", again.log());
    }
    Ok(Outcome::Passed)
}

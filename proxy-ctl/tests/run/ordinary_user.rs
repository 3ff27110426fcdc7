//! Tests of `proxy-ctl run --proxy-mode=userspace --manifests=FOLDER` by a user without any right.
//!
//! If root runs the test, the program gets another user, in a network namespace of its own.
//! Otherwise it runs as the user who runs the test.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::unix::{
        fs::{PermissionsExt as _, chown},
        process::CommandExt as _,
    },
    path::PathBuf,
    process::{Command, Output},
    thread,
    time::Instant,
};

use nix::{
    sched::{CloneFlags, unshare},
    sys::signal::Signal,
    unistd::Uid,
};
use serde_json::Value;
use tempfile::TempDir;

use super::{
    controller::{Controller, PATIENCE, once_started, replace, shown},
    free_port::free_port,
};

/// A user that has no rights, and no folder.
const NOBODY: u32 = 65_534;

struct User {
    folder: TempDir,
    is_root: bool,
}

impl User {
    fn new() -> Self {
        let is_root = Uid::effective().is_root();
        let user = Self { folder: TempDir::new().unwrap(), is_root };
        fs::create_dir(user.manifests()).unwrap();
        if is_root {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
            // The program may be where only root may go. Another process writes the copy. A child
            // that another thread starts at that moment would hold this process's open file, and
            // the copy could not be executed (ETXTBSY).
            let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_proxy-ctl")).arg(user.program()).status();
            assert!(copied.unwrap().success());
            for path in [user.folder.path().to_owned(), user.manifests()] {
                chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
            }
        }
        user
    }

    fn manifests(&self) -> PathBuf {
        self.folder.path().join("manifests")
    }

    fn program(&self) -> PathBuf {
        if self.is_root { self.folder.path().join("program") } else { env!("CARGO_BIN_EXE_proxy-ctl").into() }
    }

    fn write_manifest(&self, text: &str) {
        replace(self.folder.path(), "manifests/all.yaml", text);
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.program());
        command.args(args).env("XDG_RUNTIME_DIR", self.folder.path());
        if self.is_root {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    }

    fn output(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn show(&self, command: &str) -> Value {
        shown(&self.output(&[command, "--output", "json"]))
    }

    fn start(&self) -> Controller {
        Controller::start(
            self.command(&["run", "--proxy-mode=userspace", "--hostname-override=node-a", "-v=4"])
                .arg(format!("--healthz-bind-address=127.0.0.1:{}", free_port()))
                .arg(format!("--metrics-bind-address=127.0.0.1:{}", free_port()))
                .arg("--manifests")
                .arg(self.manifests()),
        )
    }
}

/// Answers each connection with its name.
fn endpoint(name: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.write_all(name.as_bytes());
        }
    });
    port
}

fn answer(port: u16) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn manifest(node_port: u16, endpoint: u16) -> String {
    format!(
        "apiVersion: v1
kind: Service
metadata: {{name: web, namespace: default}}
spec: {{type: NodePort, clusterIP: 10.96.0.1, clusterIPs: [10.96.0.1], ports: [{{name: http, port: 80, nodePort: {node_port}}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: web-1, namespace: default, labels: {{kubernetes.io/service-name: web}}}}
addressType: IPv4
ports: [{{name: http, port: {endpoint}}}]
endpoints: [{{addresses: [127.0.0.1], nodeName: node-a}}]
"
    )
}

#[test]
fn everything_works_without_any_right() {
    let user = User::new();
    let (first, second) = (endpoint("first"), endpoint("second"));
    let node_port = free_port();
    user.write_manifest(&manifest(node_port, first));

    let mut controller = user.start();
    controller.wait_for("everything compared and written");
    assert_eq!(answer(node_port), "first");

    let status = once_started(|| user.show("status"));
    assert_eq!(status["mode"], "userspace", "{status}");
    assert_eq!(status["controller"]["pid"], controller.child.id(), "{status}");
    let services = user.show("services");
    assert_eq!(services[0]["name"], "web");
    assert_eq!(services[0]["endpoints"][0]["port"], first);
    let served = services[0]["frontends"].as_array().unwrap();
    assert_eq!((served.len(), &served[0]["port"]), (1, &node_port.into()), "{services}");

    let other = user.output(&[
        "run",
        "--proxy-mode=userspace",
        "--hostname-override=node-a",
        "--manifests",
        user.manifests().to_str().unwrap(),
    ]);
    let told = String::from_utf8_lossy(&other.stderr).into_owned();
    assert_eq!(other.status.code(), Some(1), "{told}");
    assert!(told.contains(&format!("process {}", controller.child.id())), "{told}");

    user.write_manifest(&manifest(node_port, second));
    controller.wait_for("changes written");
    assert_eq!(answer(node_port), "second");
    assert_eq!(user.show("backends")[0]["port"], second);

    assert_eq!(controller.end_by(Signal::SIGTERM).code(), Some(0));
    assert!(TcpStream::connect(("127.0.0.1", node_port)).is_err(), "nobody carries connections any more");
}

#[test]
fn what_may_not_be_read_is_told_and_not_taken_for_absent() {
    let user = User::new();
    let pins = user.folder.path().join("bpf");
    let ours = pins.join("proxy-ctl");
    fs::create_dir_all(&ours).unwrap();
    fs::set_permissions(&ours, fs::Permissions::from_mode(0o000)).unwrap();
    for command in ["services", "backends", "flows", "status"] {
        let output = user.output(&[command, "--bpffs", pins.to_str().unwrap()]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{command}: {told}");
        assert!(told.contains("permission denied") && told.contains("as root"), "{command}: {told}");
        let shown = String::from_utf8_lossy(&output.stdout).into_owned();
        if command == "status" {
            assert!(shown.contains("not read    hooks, maps, counters and the lease: "), "{shown}");
            assert!(shown.contains("mode        not known"), "{shown}");
        } else {
            assert_eq!(shown, "", "{command}");
        }
    }
    fs::set_permissions(&ours, fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn what_is_not_served_is_told_with_the_reason() {
    let user = User::new();
    let node_port = free_port();
    user.write_manifest(&manifest(node_port, 80));
    let mut controller = user.start();
    controller.wait_for("everything compared and written");
    let deadline = Instant::now() + PATIENCE;
    // The record is written once a second.
    let told = loop {
        let status = user.show("status");
        if let Some([only]) = status["unservedFields"].as_array().map(Vec::as_slice) {
            break only.clone();
        }
        assert!(Instant::now() < deadline, "{status}");
    };
    assert_eq!(
        (&told["field"], &told["effect"]),
        (&"spec.clusterIPs".into(), &"partlyServed".into()),
        "{told}"
    );
    let why =
        "not served: 10.96.0.1:80; it is no address of this node, and no rule redirects its clients here";
    assert!(told["instead"].as_str().unwrap().starts_with(why), "{told}");
}

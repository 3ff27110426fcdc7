//! The surroundings of a test: a network namespace, a bpffs folder and a cgroup of its own. They
//! are gone with the value.

use std::{
    fs,
    net::TcpStream,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::{
        Once,
        atomic::{AtomicU32, Ordering},
    },
};

use nix::sched::{CloneFlags, unshare};
use proxy_common::layout::LAYOUT_VERSION;
use proxy_ctl::{
    config::{Ebpf, Limits},
    model::node::Host,
    modes::{
        self, Applied, Dataplane, PacketMode, Programmed as _, Snapshot,
        ebpf::{EbpfDataplane, cleanup::cleanup, view::status::Pinned},
    },
    sys::{
        bpf::{self, map::Map, socket_storage},
        proc::filesystem,
    },
};

/// Takes over the host as the controller does, once everything is written.
pub trait TakeHost: Dataplane + PacketMode {
    fn take_host(&mut self, host: &Host) -> Result<Applied, modes::Error> {
        match self.set_host(host) {
            Err(error) if error.is_taken_over() => Err(error),
            written => self.attach().and(written),
        }
    }
}

impl TakeHost for EbpfDataplane {}

pub struct Sandbox {
    pub config: Ebpf,
    cgroup: PathBuf,
}

static NEXT: AtomicU32 = AtomicU32::new(0);

impl Sandbox {
    /// Makes a sandbox. Returns `None`, and says that the test is skipped, if the machine cannot
    /// run it.
    pub fn new() -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: BPF programs and network namespaces need root");
            return None;
        }
        let Some(root) = filesystem::cgroup_root().unwrap() else {
            println!("skipped: no cgroup v2 is mounted");
            return None;
        };
        // The namespace is that of this thread and of the processes that it starts.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        run("ip", "link set lo up");
        let name = format!("proxy-ctl-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // The mount is made once. Of two mounts at once, one would hide what the other test has
        // made.
        static MOUNTED: Once = Once::new();
        MOUNTED.call_once(|| filesystem::provide_bpffs("/sys/fs/bpf".as_ref()).unwrap());
        let bpffs = PathBuf::from("/sys/fs/bpf").join(&name);
        fs::create_dir(&bpffs).unwrap();
        let cgroup = root.join(&name);
        fs::create_dir(&cgroup).unwrap();
        let limits = Limits {
            frontends: 1_024,
            services: 512,
            slots: 4_096,
            backends: 2_048,
            flows: 4_096,
            opening_flows: 1_024,
            affinity: 1_024,
            fragments: 1_024,
            source_ranges: 64,
            node_addresses: 64,
            service_counters: 4,
        };
        Some(Self {
            config: Ebpf {
                bpffs,
                limits,
                cgroup: Some(cgroup.clone()),
                allow_forwarding_annotation: true,
                ..Ebpf::default()
            },
            cgroup,
        })
    }

    /// Makes a sandbox like [`Self::new`]. Returns `None` also if the kernel does not let socket
    /// storage be read at once, which the count of connections needs.
    pub fn with_socket_storage() -> Option<Self> {
        if let Some(obstacle) = socket_storage::obstacle() {
            println!("skipped: {obstacle}");
            return None;
        }
        Self::new()
    }

    /// Makes a sandbox with a dataplane that was opened there.
    pub fn opened() -> Option<(Self, EbpfDataplane)> {
        let sandbox = Self::new()?;
        let dataplane = sandbox.open();
        Some((sandbox, dataplane))
    }

    pub fn open(&self) -> EbpfDataplane {
        self.open_with(self.config.limits)
    }

    pub fn open_with(&self, limits: Limits) -> EbpfDataplane {
        EbpfDataplane::open(&Ebpf { limits, ..self.config.clone() }).unwrap()
    }

    /// Returns what is programmed, read from the pins.
    pub fn snapshot(&self) -> Snapshot {
        Pinned::open(&self.config.bpffs).unwrap().snapshot().unwrap()
    }

    pub fn pins(&self, below: &str) -> PathBuf {
        self.config.bpffs.join(format!("proxy-ctl/v{LAYOUT_VERSION}")).join(below)
    }

    pub fn links(&self) -> PathBuf {
        self.config.bpffs.join("proxy-ctl/links")
    }

    pub fn map_pin(&self, name: &str) -> PathBuf {
        self.pins("maps").join(name)
    }

    pub fn map<K: aya::Pod + Default, V: aya::Pod + Default>(&self, name: &str) -> Map<K, V> {
        Map::new(bpf::pinned(&self.map_pin(name)).unwrap()).unwrap().unwrap()
    }

    /// Returns the number of entries that a map has room for.
    pub fn room(&self, name: &str) -> u32 {
        bpf::map_info(bpf::pinned(&self.map_pin(name)).unwrap().as_fd()).unwrap().max_entries
    }

    pub fn cgroup_path(&self) -> &Path {
        &self.cgroup
    }

    pub fn cgroup(&self) -> fs::File {
        fs::File::open(&self.cgroup).unwrap()
    }

    /// Runs a shell command as a process of the cgroup, in this thread's network namespace.
    pub fn in_cgroup(&self, command: &str) -> Output {
        let script = format!("echo $$ > {}/cgroup.procs && {command}", self.cgroup.display());
        Command::new("bash").arg("-c").arg(script).output().unwrap()
    }

    /// Returns what a process of the cgroup reads after connecting to this address, or else the
    /// error.
    pub fn dial(&self, address: &str, port: u16) -> Result<String, String> {
        let output = self.in_cgroup(&format!("exec 3<>/dev/tcp/{address}/{port} && cat <&3"));
        if output.status.success() {
            Ok(String::from_utf8(output.stdout).unwrap())
        } else {
            Err(String::from_utf8(output.stderr).unwrap())
        }
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if let Err(error) = cleanup(&self.config.bpffs) {
            println!("left {}: {error}", self.config.bpffs.display());
        }
        for folder in [&self.config.bpffs, &self.cgroup] {
            if let Err(error) = fs::remove_dir(folder) {
                println!("left {}: {error}", folder.display());
            }
        }
    }
}

pub fn run(program: &str, arguments: &str) -> String {
    let output = Command::new(program).args(arguments.split_whitespace()).output().unwrap();
    let problem = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {arguments}: {problem}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the index of an interface in this thread's namespace.
pub fn index(interface: &str) -> u32 {
    nix::net::if_::if_nametoindex(interface).unwrap()
}

/// Answers every connection with `text`, for as long as the test's process lives.
pub fn serve(address: &str, text: &'static str) -> u16 {
    use std::io::Write;
    let listener = std::net::TcpListener::bind((address, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.and_then(|mut stream: TcpStream| stream.write_all(text.as_bytes()));
        }
    });
    port
}

//! A node of a lab and a real API server, with what a cluster has before a proxy comes.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use control_plane::{ApiServer, Options, binaries::Program, objects as written};
use deploy::{api, files, image::Archive, kubelet, node::NodeFiles, oci, runc::Container, seccomp, skip};
use lab::{
    Lab, Objects,
    address::{Addresses, gateway},
    cluster::{FABRIC, PodProcesses},
    namespace,
    objects::{Endpoint, Service},
    wait,
};
use scenario::Skip;
use serde_json::{Value, json};

pub(super) const NODE: &str = "node1";
/// Pod that answers.
pub(super) const SERVER: &str = "web-1";
/// Pod that dials.
pub(super) const CLIENT: &str = "client-1";

/// Address in the manifests that has to be replaced.
const PLACEHOLDER: &str = "https://api-server.example:6443";

pub(super) struct Cluster {
    pub(super) server: ApiServer,
    pub(super) node: NodeFiles,
    pub(super) lab: Lab,
    image: Archive,
    bundle: PathBuf,
}

/// Returns the image that was built for this test.
pub(super) fn image() -> Result<Archive> {
    if let Ok(error) = env::var("PROXY_BROKEN_IMAGE") {
        bail!("the image cannot be built: {error}");
    }
    if let Ok(reason) = env::var("PROXY_NO_IMAGE") {
        bail!(Skip(format!("there is no image: {reason}")));
    }
    let Some(image) = env::var_os("PROXY_IMAGE") else {
        bail!(Skip("PROXY_IMAGE names no archive: cargo xtask test --suite deploy".into()));
    };
    Archive::open(Path::new(&image))
}

impl Cluster {
    pub(super) fn start() -> Result<Self> {
        if !nix::unistd::geteuid().is_root() {
            bail!(Skip("containers need root".into()));
        }
        let image = image()?;
        for program in [Program::Etcd, Program::KubeApiServer] {
            program.path().map_err(skip)?;
        }
        let mut lab = Lab::new()?;
        for name in [CLIENT, SERVER] {
            lab.add_pod(1, name, PodProcesses::InNodeCgroup)?;
        }
        let bundle = lab.directory().join("bundle");
        fs::create_dir_all(&bundle).context("making the bundle")?;
        image.unpack(&bundle.join("rootfs"))?;
        let node = NodeFiles::create(&lab.directory().join("node"), &lab.netns(NODE)?.cgroup)?;
        let options = Options {
            address: gateway().v4.into(),
            namespace: Some(lab.netns(FABRIC)?.namespace.clone()),
            flags: vec!["--allow-privileged=true".to_owned()],
            service_accounts: true,
            ..Options::default()
        };
        let server = ApiServer::start_with(&lab.directory().join("control-plane"), options)?;
        let cluster = Self { server, node, lab, image, bundle };
        cluster.wait_for_its_service()?;
        cluster.add_what_controllers_make()?;
        cluster.add_node()?;
        Ok(cluster)
    }

    /// Waits for Service kubernetes. The API server makes it after it is ready, and kubelets name
    /// it in the environment of each pod.
    fn wait_for_its_service(&self) -> Result<()> {
        wait::until("Service kubernetes", Duration::from_secs(60), || {
            let found = self.server.run(async |client| api::get(&client, kubelet::API_SERVICE).await);
            found.map(Some).map_err(|error| format!("{error:#}"))
        })
        .map(drop)
    }

    /// Adds what kube-controller-manager puts into each namespace.
    fn add_what_controllers_make(&self) -> Result<()> {
        let authority = fs::read_to_string(self.server.authority_file()).context("reading the CA")?;
        self.store(&[
            written::service_account("kube-system", "default"),
            json!({
                "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "kube-system", "name": "kube-root-ca.crt"},
                "data": {"ca.crt": authority},
            }),
        ])
    }

    fn add_node(&self) -> Result<()> {
        let mut objects = Objects::default();
        let ranges = ["10.244.1.0/24".to_owned(), "fd00:10:244:1::/64".to_owned()];
        objects.set_node(NODE, self.addresses()?, ranges);
        self.publish(&objects)
    }

    /// Returns the addresses of the node.
    pub(super) fn addresses(&self) -> Result<Addresses> {
        Ok(self.lab.netns(NODE)?.addresses)
    }

    fn publish(&self, objects: &Objects) -> Result<()> {
        self.server.run(async |client| {
            for (_, object) in objects.iter() {
                written::apply(&client, object).await?;
            }
            Ok(())
        })
    }

    /// Adds a Service whose endpoint is [`SERVER`].
    pub(super) fn add_service(&self, name: &str, at: Addresses, port: u16) -> Result<()> {
        let mut objects = Objects::default();
        let service = Service::new(name, at, port, lab::cluster::SERVER_PORT, None);
        objects.set_service(&service, &[Endpoint::ready(self.lab.netns(SERVER)?.addresses, 1)]);
        self.publish(&objects)
    }

    /// Returns the objects of files below deploy/, with the API server's address in place of the
    /// placeholder, as with the README's `sed`.
    pub(super) fn objects(&self, names: &[&str]) -> Result<Vec<Value>> {
        let mut objects = Vec::new();
        for name in names {
            objects.extend(files::documents(&files::text(name)?.replace(PLACEHOLDER, &self.server.url()))?);
        }
        Ok(objects)
    }

    pub(super) fn store(&self, objects: &[Value]) -> Result<()> {
        self.server.run(async |client| {
            for object in objects {
                api::store(&client, object).await?;
            }
            Ok(())
        })
    }

    /// Returns the pod that the DaemonSet controller makes for the node, as the API server admits
    /// it.
    pub(super) fn pod_of(&self, daemon_set: &Value) -> Result<Value> {
        let template = &daemon_set["spec"]["template"];
        let (mut metadata, mut spec) = (template["metadata"].clone(), template["spec"].clone());
        let name = |pointer| daemon_set.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        metadata["name"] = format!("{}-x7k2p", name("/metadata/name")).into();
        metadata["namespace"] = name("/metadata/namespace").into();
        spec["nodeName"] = NODE.into();
        self.admit(&json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}))
    }

    pub(super) fn admit(&self, pod: &Value) -> Result<Value> {
        self.server.run(async |client| api::store(&client, pod).await)
    }

    /// Does what the kubelet does once for a pod.
    pub(super) fn take(&mut self, pod: Value, seccomp: seccomp::Runtime) -> Result<Pod> {
        let name = pod["metadata"]["name"].as_str().context("metadata.name")?.to_owned();
        let folder = self.lab.directory().join("pods").join(&name);
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        let (server, node) = (&self.server, &mut self.node);
        let volumes = server.run(async |client| kubelet::volumes(&client, &pod, node, &folder).await)?;
        Ok(Pod { object: pod, folder, volumes, seccomp, started: 0 })
    }

    /// Starts a container of the pod.
    pub(super) fn run(&self, pod: &mut Pod, container: &Value) -> Result<Container> {
        let image = container["image"].as_str().context("image")?;
        ensure!(image == self.image.name, "the image is {}, the manifest asks for {image}", self.image.name);
        let object = &pod.object;
        let environment =
            self.server.run(async |client| kubelet::environment(&client, object, container).await)?;
        let prepared = oci::Prepared { environment, volumes: pod.volumes.clone() };
        let network = namespace::path(&self.lab.netns(NODE)?.namespace);
        pod.started += 1;
        let name = pod.object["metadata"]["name"].as_str().context("metadata.name")?;
        let id = format!("{}-{name}-{}", self.lab.name(), pod.started);
        let cgroup = format!("/{id}");
        let sandbox = oci::Sandbox { network_namespace: &network, cgroup: &cgroup };
        let mut configuration =
            oci::configuration(object, container, &self.image.config, &prepared, sandbox)?;
        if oci::wants_default_seccomp(container)? {
            configuration["linux"]["seccomp"] = pod.seccomp.profile(&configuration, &pod.folder)?;
        }
        Container::start(&self.bundle, &id, &configuration, &pod.folder.join("log"))
    }
}

/// Pod that the node has taken.
pub(super) struct Pod {
    pub(super) object: Value,
    folder: PathBuf,
    volumes: BTreeMap<String, PathBuf>,
    seccomp: seccomp::Runtime,
    started: u32,
}

//! The control plane: API server, controllers, scheduler, a DNS server and a load-balancer
//! controller.

use std::{ffi::OsString, path::Path, process::Command, time::Duration};

use anyhow::{Context as _, Result};
use control_plane::{ADMIN, ApiServer, Options, Process, objects};
use lab::wait;
use serde_json::{Value, json};

use crate::{
    addresses::{
        self, API_SERVICE4, API_SERVICE6, CONTROL_PLANE4, DNS_SERVICE, NodeNumber, POD_RANGE4, POD_RANGE6,
        SERVICE_RANGES,
    },
    home::Home,
    network,
    programs::Program,
};

/// Folder of the control plane's files, below the cluster's own.
pub(crate) const FOLDER: &str = "control-plane";
const OBJECTS_LIMIT: Duration = Duration::from_secs(30);
const READY_LIMIT: Duration = Duration::from_secs(180);

pub(crate) struct ControlPlane {
    /// Programs that end before the API server does.
    programs: Vec<Process>,
    pub(crate) server: ApiServer,
}

impl ControlPlane {
    pub(crate) fn start(home: &Home) -> Result<Self> {
        let namespace = network::control_plane(home.name());
        let options = Options {
            address: CONTROL_PLANE4.parse().context("the address of the control plane")?,
            namespace: Some(namespace.clone()),
            flags: vec![
                "--allow-privileged=true".into(),
                "--kubelet-preferred-address-types=InternalIP".into(),
            ],
            service_ranges: SERVICE_RANGES.into(),
            certificate_addresses: [API_SERVICE4, API_SERVICE6]
                .iter()
                .map(|address| address.parse().context("an address of Service kubernetes"))
                .collect::<Result<_>>()?,
            service_accounts: true,
            ..Options::default()
        };
        let folder = home.subfolder(FOLDER)?;
        let server = ApiServer::start_with(&folder, options)?;
        let kubeconfig = server.kubeconfig(ADMIN);
        let flag = |name: &str, value: &Path| {
            let mut flag = OsString::from(format!("--{name}="));
            flag.push(value);
            flag
        };
        let mut programs = Vec::new();
        for (program, flags) in [
            (Program::ControllerManager, controllers(&server, flag)),
            (Program::Scheduler, vec!["--leader-elect=false".into(), "--v=1".into()]),
            (Program::LoadBalancers, Vec::new()),
            (Program::Dns, vec!["--listen=:53".into()]),
        ] {
            let mut command = Command::new(program.path()?);
            command.arg(flag("kubeconfig", &kubeconfig)).args(flags);
            let log = folder.join(format!("{}.log", program.name()));
            programs.push(Process::start(&command, &log, Some(&namespace))?);
        }
        Ok(Self { programs, server })
    }

    /// Returns an error if one of the programs has ended.
    pub(crate) fn alive(&mut self) -> Result<()> {
        self.programs.iter_mut().try_for_each(Process::alive)
    }

    /// Writes the objects that an installer makes: nodes, and the Service of DNS.
    pub(crate) fn publish(&self, nodes: NodeNumber) -> Result<()> {
        let objects = (1..=nodes).map(node).chain(dns()).collect::<Vec<_>>();
        // The namespace kube-system appears soon after the start.
        wait::until("writing the cluster's first objects", OBJECTS_LIMIT, || {
            let written = objects.iter().try_for_each(|object| self.server.apply(object));
            written.map(Some).map_err(|error| format!("{error:#}"))
        })
    }

    /// Waits until all nodes are ready. `alive` says whether this is still worth waiting for.
    pub(crate) fn wait_for_nodes(
        &mut self,
        nodes: NodeNumber,
        mut alive: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        wait::until("nodes", READY_LIMIT, || {
            let looked = self.alive().and_then(|()| alive()).and_then(|()| self.ready_nodes());
            let ready = looked.map_err(|error| format!("{error:#}"))?;
            if ready == usize::from(nodes) {
                Ok(Some(()))
            } else {
                Err(format!("{ready} of {nodes} are ready"))
            }
        })
    }

    fn ready_nodes(&self) -> Result<usize> {
        let list = self.server.run(async |client| objects::get(&client, "/api/v1/nodes").await)?;
        let is_ready = |node: &&Value| {
            let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
            conditions.filter(|condition| condition["type"] == "Ready").any(|ready| ready["status"] == "True")
        };
        Ok(list["items"].as_array().into_iter().flatten().filter(is_ready).count())
    }
}

fn controllers(server: &ApiServer, flag: impl Fn(&str, &Path) -> OsString) -> Vec<OsString> {
    vec![
        "--leader-elect=false".into(),
        flag("root-ca-file", &server.authority_file()),
        flag("service-account-private-key-file", server.account_key_file()),
        "--use-service-account-credentials=false".into(),
        format!("--cluster-cidr={POD_RANGE4},{POD_RANGE6}").into(),
        "--allocate-node-cidrs=false".into(),
        format!("--service-cluster-ip-range={SERVICE_RANGES}").into(),
        "--kube-api-qps=200".into(),
        "--kube-api-burst=400".into(),
        "--v=1".into(),
    ]
}

/// Makes a Node with its zone and its pods, which a kubelet does not write.
fn node(number: NodeNumber) -> Value {
    let name = addresses::node_name(number);
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {
            "kubernetes.io/hostname": name,
            "topology.kubernetes.io/zone": addresses::zone(number),
        }},
        "spec": {
            "podCIDR": addresses::pods4(number),
            "podCIDRs": [addresses::pods4(number), addresses::pods6(number)],
        },
    })
}

/// Makes a Service without a selector, whose endpoint is the DNS server in the control plane's
/// namespace.
fn dns() -> [Value; 2] {
    let ports = json!([
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]);
    let labels = json!({"k8s-app": "kube-dns", "kubernetes.io/name": "CoreDNS"});
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": labels},
        "spec": {"clusterIP": DNS_SERVICE, "ports": ports},
    });
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns-e2e",
            "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "kube-dns"},
        },
        "addressType": "IPv4",
        "ports": ports,
        "endpoints": [{"addresses": [CONTROL_PLANE4], "conditions": {"ready": true}}],
    });
    [service, slice]
}

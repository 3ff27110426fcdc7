//! A proxy that dials the API server at the address of Service kubernetes, which the proxy itself
//! serves.

use std::{fs, net::IpAddr, process::Command};

use anyhow::{Context, Result, ensure};
use control_plane::objects;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{node::Node, scenarios::PROGRAMMED, until::until, world::World};

/// Address of the API server that endpoints may have, unlike a loopback address.
const SERVER: &str = "192.0.2.253";

/// Address that this network namespace has until this is dropped.
struct OwnAddress(&'static str);

impl OwnAddress {
    fn add(address: &'static str) -> Result<Self> {
        ensure!(ip("add", address)?, "{address} cannot be added");
        Ok(Self(address))
    }
}

impl Drop for OwnAddress {
    fn drop(&mut self) {
        // The namespace ends with this process, so an error does not matter.
        let _ = ip("del", self.0);
    }
}

fn ip(what: &str, address: &str) -> Result<bool> {
    let address = format!("{address}/32");
    let status = Command::new("ip").args(["address", what, &address, "dev", "lo"]).status();
    Ok(status.context("starting ip")?.success())
}

/// Makes the slice of Service kubernetes with these endpoints.
fn servers(addresses: &[IpAddr], port: u16) -> Value {
    let mut slice = objects::endpoint_slice("default", "kubernetes", "kubernetes", addresses, port);
    slice["ports"][0]["name"] = "https".into();
    slice
}

fn endpoints_of(own: &Node, service: &str) -> Result<Value> {
    let services = own.services()?;
    let found = services.as_array().into_iter().flatten().find(|one| one["name"] == service);
    Ok(found.map_or(Value::Null, |one| one["endpoints"].clone()))
}

/// Expects the proxy to reach the API server again. Without endpoints of that Service, the proxy's
/// own hooks would refuse its own dials for good.
pub(crate) fn an_api_server_behind_its_service_is_dialled_again_without_endpoints(
    world: &mut World,
) -> Result<()> {
    let own = Node::known(world, "through-service", 32)?;
    let _address = OwnAddress::add(SERVER)?;
    let server: IpAddr = SERVER.parse()?;
    let relay = world.relay((server, 0).into())?;
    let port = relay.address.port();
    world.apply(&servers(&[server], port))?;

    // A proxy that dials the ClusterIP needs a predecessor that serves it.
    let mut predecessor = own.run(&json!({}))?;
    predecessor.send(Signal::SIGTERM)?;
    predecessor.ends()?;
    let direct = fs::read_to_string(world.kubeconfig()).context("reading a kubeconfig")?;
    let at = format!("server: {}", world.server.url());
    ensure!(direct.contains(&at), "another server: {direct}");
    let through = direct.replace(&at, "server: https://10.96.0.1:443\n    tls-server-name: 127.0.0.1");
    let kubeconfig = world.directory.path().join("through-service.kubeconfig");
    fs::write(&kubeconfig, through).context("writing a kubeconfig")?;
    let proxy = own.start_among_clients(&json!({"clientConnection": {"kubeconfig": kubeconfig}}))?;
    proxy.says(PROGRAMMED)?;
    ensure!(relay.accepted() > 0, "it has not dialled the Service:\n{}", proxy.log());

    // The proxy sees changes of slices in order. The second change shows that it has seen the
    // first.
    world.apply(&servers(&[], port))?;
    let web = |addresses: &[&str]| -> Result<Value> {
        let addresses =
            addresses.iter().map(|address| address.parse()).collect::<Result<Vec<IpAddr>, _>>()?;
        Ok(objects::endpoint_slice("default", "web-1", "web", &addresses, 8080))
    };
    world.apply(&web(&["10.0.0.1", "10.0.0.2"])?)?;
    let seen = || Ok(endpoints_of(&own, "web")?.to_string().contains("10.0.0.2").then_some(()));
    until("another endpoint", seen, || proxy.log())?;
    let kept = endpoints_of(&own, "kubernetes")?;
    ensure!(kept[0]["address"] == SERVER, "the endpoint of the API server is not kept: {kept}");

    let before = relay.accepted();
    relay.cut();
    relay.restore();
    let added = objects::service("default", "after-the-cut", 83);
    world.apply(&added)?;
    let followed = || Ok((!endpoints_of(&own, "after-the-cut")?.is_null()).then_some(()));
    until("a Service that came after the connections had broken", followed, || proxy.log())?;
    ensure!(relay.accepted() > before, "no connection has broken");

    world.delete(&added)?;
    world.apply(&web(&["10.0.0.1"])?)?;
    world.delete(&servers(&[], port))
}

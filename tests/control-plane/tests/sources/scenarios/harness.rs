//! What others rely on in the harness itself.

use std::{
    net::TcpStream,
    process::{self, Command},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use control_plane::{ApiServer, Options};
use serde_json::json;

use crate::world::World;

struct Namespace(String);

impl Namespace {
    fn create(address: &str) -> Result<Self> {
        let created = Self(format!("px-control-{}", process::id()));
        ip(&["netns", "add", &created.0])?;
        ip(&["-n", &created.0, "link", "set", "lo", "up"])?;
        ip(&["-n", &created.0, "address", "add", address, "dev", "lo"])?;
        Ok(created)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = ip(&["netns", "delete", &self.0]) {
            eprintln!("{error:#}");
        }
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    let status = Command::new("ip").args(arguments).status().context("starting ip (package iproute2)")?;
    ensure!(status.success(), "ip {} failed", arguments.join(" "));
    Ok(())
}

pub(super) fn an_api_server_lives_in_a_network_namespace(world: &mut World) -> Result<()> {
    let namespace = Namespace::create("192.0.2.77/32")?;
    let address = "192.0.2.77".parse().context("address")?;
    let options = Options { address, namespace: Some(namespace.0.clone()), ..Options::default() };
    let server = ApiServer::start_with(&world.directory.path().join("namespace"), options)?;
    server.apply(&json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "there"},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.78"}]},
    }))?;
    let node = server.run(async |client| {
        let request = http::Request::get("/api/v1/nodes/there").body(Vec::new())?;
        Ok(client.request::<serde_json::Value>(request).await?)
    })?;
    let found = node.pointer("/status/addresses/0/address");
    ensure!(found == Some(&json!("192.0.2.78")), "the Node's address is {found:?}");
    let outside = TcpStream::connect_timeout(&server.socket_address(), Duration::from_millis(200));
    ensure!(outside.is_err(), "reachable from outside the namespace");
    Ok(())
}

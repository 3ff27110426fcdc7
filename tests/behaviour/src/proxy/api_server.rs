//! A real API server in the lab's fabric, with the scenario's objects.

use std::path::PathBuf;

use anyhow::Result;
use control_plane::{ADMIN, Options};
use lab::{Lab, Objects, address::gateway, cluster::FABRIC, objects::Key};
use serde_json::Value;

pub struct ApiServer {
    server: control_plane::ApiServer,
    published: Objects,
}

impl ApiServer {
    /// Starts etcd and kube-apiserver and waits until they serve.
    pub fn start(lab: &Lab) -> Result<Self> {
        let options = Options {
            address: gateway().v4.into(),
            namespace: Some(lab.netns(FABRIC)?.namespace.clone()),
            ..Options::default()
        };
        let server = control_plane::ApiServer::start_with(&lab.directory().join("control-plane"), options)?;
        Ok(Self { server, published: Objects::default() })
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.server.kubeconfig(ADMIN)
    }

    /// Ends the server as a crash would.
    pub fn kill(&mut self) {
        self.server.kill();
    }

    /// Writes what differs from the objects that were published before. The sentinel comes last.
    pub fn publish(&mut self, objects: &Objects) -> Result<()> {
        let gone: Vec<&Value> = self
            .published
            .iter()
            .filter(|(key, _)| objects.get(key).is_none())
            .map(|(_, object)| object)
            .collect();
        let mut changed: Vec<(&Key, &Value)> =
            objects.iter().filter(|(key, object)| self.published.get(key) != Some(object)).collect();
        changed.sort_by_key(|(key, _)| key.1.starts_with("sentinel"));
        self.server.run(async |client| {
            for object in gone {
                control_plane::objects::delete(&client, object).await?;
            }
            for (_, object) in changed {
                control_plane::objects::apply(&client, object).await?;
            }
            Ok(())
        })?;
        self.published = objects.clone();
        Ok(())
    }
}

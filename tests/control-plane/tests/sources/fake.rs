//! A small API server that only lists and watches, over plain HTTP. Like an older kube-apiserver,
//! it knows neither streaming lists nor ServiceCIDRs.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

use crate::world::World;

const SERVICES: &str = "/api/v1/services";
const NODES: &str = "/api/v1/nodes";
const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices";

/// Content type and body.
pub(crate) type Spoilt = (&'static str, Vec<u8>);

pub(crate) struct Fake {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    state: Mutex<State>,
    version: watch::Sender<u64>,
    /// Even number while the server serves. All connections end when it changes.
    era: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    /// Objects by path, then by name.
    collections: BTreeMap<String, BTreeMap<String, Value>>,
    /// Events that watches get: path, version, type, object.
    log: Vec<(String, u64, &'static str, Value)>,
    version: u64,
    requests: Vec<String>,
    /// Answers that watches of a collection give instead of the right ones.
    spoilt: BTreeMap<String, Spoilt>,
}

impl Fake {
    pub(crate) fn start(world: &World) -> Result<Self> {
        let mut state = State::default();
        for path in [SERVICES, NODES, SLICES] {
            state.collections.insert(path.to_owned(), BTreeMap::new());
        }
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            version: watch::Sender::new(0),
            era: watch::Sender::new(0),
        });
        world.block_on(async {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("binding the fake")?;
            let address = listener.local_addr().context("binding the fake")?;
            let for_task = Arc::clone(&shared);
            let task = tokio::spawn(async move {
                while let Ok((client, _)) = listener.accept().await {
                    let shared = Arc::clone(&for_task);
                    tokio::spawn(async move {
                        let mut era = shared.era.subscribe();
                        tokio::select! {
                            // The connection is closed, however this ends.
                            _ = serve(client, &shared) => {}
                            _ = era.changed() => {}
                        }
                    });
                }
            });
            Ok(Self { address, shared, task })
        })
    }

    /// Writes a kubeconfig without credentials.
    pub(crate) fn kubeconfig(&self, world: &World) -> Result<std::path::PathBuf> {
        let path = world.directory.path().join(format!("fake-{}.kubeconfig", self.address.port()));
        let text = format!(
            "current-context: fake\ncontexts:\n- name: fake\n  context: {{cluster: fake, user: ''}}\n\
             clusters:\n- name: fake\n  cluster: {{server: 'http://{}'}}\n",
            self.address
        );
        std::fs::write(&path, text).context("writing a kubeconfig")?;
        Ok(path)
    }

    /// Makes all watches of services answer this at once, and end.
    pub(crate) fn spoil_services(&self, instead: Option<Spoilt>) {
        let mut state = self.shared.lock();
        match instead {
            Some(instead) => state.spoilt.insert(SERVICES.to_owned(), instead),
            None => state.spoilt.remove(SERVICES),
        };
        drop(state);
        self.shared.era.send_modify(|era| *era += 1);
    }

    pub(crate) fn apply(&self, object: &Value) {
        self.change(object, false);
    }

    pub(crate) fn delete(&self, object: &Value) {
        self.change(object, true);
    }

    /// Returns `GET path?query` of each request so far.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.shared.lock().requests.clone()
    }

    fn change(&self, object: &Value, delete: bool) {
        let path = match object["kind"].as_str() {
            Some("Service") => SERVICES,
            Some("Node") => NODES,
            _ => SLICES,
        };
        let mut state = self.shared.lock();
        state.version += 1;
        let version = state.version;
        let mut object = object.clone();
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        let collection = state.collections.entry(path.to_owned()).or_default();
        let name = name(&object);
        let kind = if delete {
            collection.remove(&name);
            "DELETED"
        } else if collection.insert(name, object.clone()).is_some() {
            "MODIFIED"
        } else {
            "ADDED"
        };
        state.log.push((path.to_owned(), version, kind, object));
        drop(state);
        self.shared.version.send_replace(version);
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.task.abort();
        self.shared.era.send_modify(|era| *era += 1);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn name(object: &Value) -> String {
    format!("{}/{}", object["metadata"]["namespace"], object["metadata"]["name"])
}

/// Serves one request. The connection ends with its answer.
async fn serve(mut client: TcpStream, shared: &Shared) -> Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if client.read(&mut byte).await? == 0 {
            return Ok(());
        }
        head.extend(byte);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let target = head.split(' ').nth(1).unwrap_or_default().to_owned();
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let answer = {
        let mut state = shared.lock();
        state.requests.push(format!("GET {target}"));
        answer(&state, path, query)
    };
    match answer {
        Answer::Whole(code, body) => {
            let text = body.to_string();
            let head = format!(
                "HTTP/1.1 {code} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                text.len()
            );
            client.write_all(format!("{head}{text}").as_bytes()).await?;
        }
        Answer::Watch(from) => watch(client, shared, path, from).await?,
    }
    Ok(())
}

enum Answer {
    Whole(u16, Value),
    /// All events after this version.
    Watch(u64),
}

fn answer(state: &State, path: &str, query: &str) -> Answer {
    let parameter = |name: &str| {
        query
            .split('&')
            .find_map(|pair| pair.split_once('=').filter(|(key, _)| *key == name))
            .map(|(_, value)| value)
    };
    if let Some(collection) = state.collections.get(path) {
        if !matches!(parameter("watch"), Some("true" | "1")) {
            let items: Vec<&Value> = collection.values().collect();
            let metadata = json!({"resourceVersion": state.version.to_string()});
            let list = json!({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items});
            return Answer::Whole(200, list);
        }
        if parameter("resourceVersionMatch").is_some() {
            let message = "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden for watch";
            return refusal(422, "Invalid", message);
        }
        let from = parameter("resourceVersion").and_then(|version| version.parse().ok());
        return Answer::Watch(from.unwrap_or(0));
    }
    refusal(404, "NotFound", "the server could not find the requested resource")
}

fn refusal(code: u16, reason: &str, message: &str) -> Answer {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    });
    Answer::Whole(code, status)
}

async fn watch(mut client: TcpStream, shared: &Shared, path: &str, from: u64) -> Result<()> {
    let spoilt = shared.lock().spoilt.get(path).cloned();
    let content = spoilt.as_ref().map_or("application/json", |(content, _)| content);
    let head = format!("HTTP/1.1 200 OK\r\nContent-Type: {content}\r\nConnection: close\r\n\r\n");
    client.write_all(head.as_bytes()).await?;
    if let Some((_, body)) = spoilt {
        return Ok(client.write_all(&body).await?);
    }
    let mut told = from;
    let mut version = shared.version.subscribe();
    loop {
        version.borrow_and_update();
        let news: Vec<String> = {
            let state = shared.lock();
            let new = state.log.iter().filter(|(of, version, ..)| of == path && *version > told);
            // The type comes first, as Go writes it.
            let line = |kind: &str, object: &Value| format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n");
            let lines = new.map(|(_, _, kind, object)| line(kind, object));
            let lines = lines.collect();
            told = told.max(state.version);
            lines
        };
        for line in news {
            client.write_all(line.as_bytes()).await?;
        }
        version.changed().await?;
    }
}

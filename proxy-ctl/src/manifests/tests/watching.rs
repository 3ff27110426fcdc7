//! Tests of a running source that follows its folder.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use tempfile::TempDir;
use tokio::{sync::mpsc, task::JoinHandle};

use super::{
    super::{Error, Manifests},
    files::service,
};
use crate::{kubernetes::convert::invalid::InvalidField, model::Update};

/// The longest wait for an update. Only a failing test waits so long.
const PATIENCE: Duration = Duration::from_secs(20);

struct Running {
    /// The parent of the watched folder, which is removed when this is dropped.
    parent: TempDir,
    updates: mpsc::Receiver<Update>,
    invalid: Arc<Mutex<Vec<InvalidField>>>,
    task: JoinHandle<Result<(), Error>>,
}

impl Running {
    /// Starts a source. `fill` prepares the folder.
    fn start(fill: impl FnOnce(&Path)) -> Self {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("manifests");
        fs::create_dir(&folder).unwrap();
        fill(&folder);
        let (sender, updates) = mpsc::channel(1);
        let invalid = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&invalid);
        let manifests = Manifests::open(&folder, "here").unwrap();
        let report = move |field| told.lock().unwrap().push(field);
        let task = tokio::spawn(manifests.run(sender, report));
        Self { parent, updates, invalid, task }
    }

    fn folder(&self) -> PathBuf {
        self.parent.path().join("manifests")
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.folder().join(name), text).unwrap();
    }

    /// Receives updates until the Services have these names.
    async fn until(&mut self, expected: &[&str]) {
        let expected: BTreeSet<String> = expected.iter().map(|name| (*name).to_owned()).collect();
        let mut last = BTreeSet::new();
        let wait = async {
            while let Some(update) = self.updates.recv().await {
                if let Update::ReplaceServices(services) = update {
                    last = services.iter().map(|service| service.name.name.to_string()).collect();
                    if last == expected {
                        return;
                    }
                }
            }
            panic!("the source has ended");
        };
        let result = tokio::time::timeout(PATIENCE, wait).await;
        assert!(result.is_ok(), "expected {expected:?}, last were {last:?}");
    }

    fn invalid(&self) -> Vec<String> {
        self.invalid.lock().unwrap().iter().map(|field| field.object.clone()).collect()
    }
}

#[tokio::test]
async fn first_everything_is_sent() {
    const RANGES: &str = "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: more}\nspec: {cidrs: [10.96.0.0/12]}\n";
    let mut running = Running::start(|folder| {
        fs::write(folder.join("a.yaml"), format!("{}---\n{RANGES}", service("a", "10.96.0.1"))).unwrap();
    });
    let mut kinds = Vec::new();
    for _ in 0..4 {
        kinds.push(match running.updates.recv().await {
            Some(Update::Node(Some(node))) if node.addresses.is_empty() => "no node".to_owned(),
            Some(Update::ReplaceServiceCidrs(ranges)) => {
                format!("{:?}", ranges.iter().flat_map(|one| &one.ranges).collect::<Vec<_>>())
            }
            Some(Update::ReplaceServices(services)) => format!("{} services", services.len()),
            Some(Update::ReplaceSlices(slices)) => format!("{} slices", slices.len()),
            other => panic!("{other:?}"),
        });
    }
    assert_eq!(kinds, ["no node", "[10.96.0.0/12]", "1 services", "0 slices"]);
}

#[tokio::test]
async fn files_come_change_and_go() {
    let mut running = Running::start(|_| {});
    running.until(&[]).await;
    running.write("1.yaml", &service("a", "10.96.0.1"));
    running.until(&["a"]).await;
    running.write("2.yaml", &service("b", "10.96.0.2"));
    running.until(&["a", "b"]).await;
    running.write("1.yaml", &service("c", "10.96.0.3"));
    running.until(&["b", "c"]).await;
    fs::remove_file(running.folder().join("2.yaml")).unwrap();
    running.until(&["c"]).await;
    fs::rename(running.folder().join("1.yaml"), running.folder().join("1.off")).unwrap();
    running.until(&[]).await;
    assert_eq!(running.invalid(), [""; 0]);
}

#[tokio::test]
async fn an_editor_that_renames_is_followed() {
    let mut running =
        Running::start(|folder| fs::write(folder.join("a.yaml"), service("a", "10.96.0.1")).unwrap());
    running.until(&["a"]).await;
    let text = |name: &str| service(name, "10.96.0.1");
    for name in ["b", "c"] {
        // One file is renamed within the folder, the other comes from elsewhere.
        let temporary =
            if name == "b" { running.folder().join(".a.tmp") } else { running.parent.path().join("a.tmp") };
        fs::write(&temporary, text(name)).unwrap();
        fs::rename(&temporary, running.folder().join("a.yaml")).unwrap();
        running.until(&[name]).await;
    }
}

/// The kubelet updates a ConfigMap volume in this way.
#[tokio::test]
async fn a_config_map_that_swaps_its_link_is_followed() {
    let version = |folder: &Path, version: &str, names: &[&str]| {
        fs::create_dir(folder.join(version)).unwrap();
        let text: String = names.iter().map(|name| service(name, "10.96.0.1") + "---\n").collect();
        fs::write(folder.join(version).join("web.yaml"), text).unwrap();
        symlink(version, folder.join("..data_tmp")).unwrap();
        fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    };
    let mut running = Running::start(|folder| {
        version(folder, "..1", &["a"]);
        symlink("..data/web.yaml", folder.join("web.yaml")).unwrap();
    });
    running.until(&["a"]).await;
    version(&running.folder(), "..2", &["b", "c"]);
    fs::remove_dir_all(running.folder().join("..1")).unwrap();
    running.until(&["b", "c"]).await;
}

#[tokio::test]
async fn a_burst_does_not_lose_the_last_change() {
    let mut running = Running::start(|_| {});
    for round in 0..50 {
        for number in 0..10 {
            running.write(&format!("{number}.yaml"), &service(&format!("s{number}-{round}"), "10.96.0.1"));
        }
    }
    let last: Vec<String> = (0..10).map(|number| format!("s{number}-49")).collect();
    let last: Vec<&str> = last.iter().map(String::as_str).collect();
    running.until(&last).await;
    running.write("last.yaml", &service("last", "10.96.0.2"));
    running.until(&[last.as_slice(), &["last"]].concat()).await;
}

#[tokio::test]
async fn a_change_while_the_receiver_is_slow_is_not_lost() {
    let mut running = Running::start(|_| {});
    // The channel holds one update, so the source waits with the next one of its first listing.
    let Some(Update::Node(Some(_))) = running.updates.recv().await else { panic!("no node first") };
    running.write("a.yaml", &service("a", "10.96.0.1"));
    running.until(&["a"]).await;
}

#[tokio::test]
async fn a_broken_document_is_told_once_and_keeps_what_was() {
    let mut running =
        Running::start(|folder| fs::write(folder.join("a.yaml"), service("a", "10.96.0.1")).unwrap());
    running.until(&["a"]).await;
    running.write("a.yaml", "kind: [\n");
    running.write("b.yaml", &service("b", "10.96.0.2"));
    running.until(&["a", "b"]).await;
    running.write("c.yaml", &service("c", "10.96.0.3"));
    running.until(&["a", "b", "c"]).await;
    assert_eq!(running.invalid(), ["a.yaml, document 1"]);
}

#[tokio::test]
async fn a_folder_that_disappears_leaves_everything_until_it_is_back() {
    let mut running =
        Running::start(|folder| fs::write(folder.join("a.yaml"), service("a", "10.96.0.1")).unwrap());
    running.until(&["a"]).await;
    for (back, name) in [("deleted", "b"), ("moved away", "c")] {
        if back == "deleted" {
            fs::remove_dir_all(running.folder()).unwrap();
        } else {
            fs::rename(running.folder(), running.parent.path().join("old")).unwrap();
        }
        fs::create_dir(running.folder()).unwrap();
        running.write("new.yaml", &service(name, "10.96.0.2"));
        running.until(&[name]).await;
        running.write("more.yaml", &service("more", "10.96.0.3"));
        running.until(&[name, "more"]).await;
    }
}

#[tokio::test]
async fn it_ends_when_nobody_receives() {
    let Running { parent, updates, task, .. } = Running::start(|_| {});
    drop(updates);
    let ended = tokio::time::timeout(PATIENCE, task).await;
    assert!(matches!(ended, Ok(Ok(Ok(())))), "{ended:?}");
    drop(parent);
}

#[test]
fn a_folder_that_is_none_is_an_error_at_once() {
    let parent = tempfile::tempdir().unwrap();
    let file = parent.path().join("file");
    fs::write(&file, "").unwrap();
    for folder in [parent.path().join("missing"), file] {
        let Err(error) = Manifests::open(&folder, "here") else { panic!("{}", folder.display()) };
        assert!(
            error.to_string().starts_with(&format!("manifests folder {}: ", folder.display())),
            "{error}"
        );
    }
}

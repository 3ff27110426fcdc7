//! Tests of the controller's thread: when it opens, writes, answers and ends.

use std::{sync::mpsc as channel, thread::JoinHandle};

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{
    controller::run::Ended,
    http::report::{ModeChoice, Moment},
    model::mode::{ChosenMode, Mode, RequestedMode},
    modes::Modes,
};

/// A controller on its thread, with the other ends of its channels.
struct Thread {
    updates: mpsc::Sender<Update>,
    networks: watch::Sender<Option<NodeNetwork>>,
    metrics_requests: MetricsRequests,
    stop: CancellationToken,
    reports: Reports,
    ended: JoinHandle<Result<(), Ended>>,
    _configs: watch::Sender<Arc<Config>>,
    _choices: watch::Sender<ModeChoice>,
}

fn choice() -> ModeChoice {
    let modes = Modes { active: Mode::Ebpf, secondary: None };
    let requested = RequestedMode::Ebpf;
    let chosen = ChosenMode { mode: modes.active, requested, reasons: Vec::new(), fallback: None };
    ModeChoice { chosen, modes }
}

/// Opens one dataplane, once.
struct OpenerOfOne<F>(Mutex<Option<F>>);

impl<F: FnOnce() -> Result<Box<dyn Dataplane>, Error>> ModeOpener for OpenerOfOne<F> {
    fn open(&self, _: Modes, _: &Arc<Config>) -> Result<Box<dyn Dataplane>, Error> {
        self.0.lock().unwrap().take().unwrap()()
    }

    fn open_to_drain(&self, _: Mode, _: &Config) -> Result<Option<Box<dyn Dataplane>>, Error> {
        Ok(None)
    }

    fn to_drain(&self, _: Mode, _: &Config) -> Result<Vec<Mode>, Error> {
        Ok(Vec::new())
    }

    fn remove_drained(&self, _: Mode, _: Mode, _: &Config, _: &mut Remains) -> Result<bool, Error> {
        Ok(true)
    }
}

impl Thread {
    fn start(open: impl FnOnce() -> Result<Box<dyn Dataplane>, Error> + Send + 'static) -> Self {
        let opener = OpenerOfOne(Mutex::new(Some(open)));
        let config = Arc::new(Config::default());
        let (updates_in, updates) = mpsc::channel(16);
        let (networks_in, networks) = watch::channel(None);
        let (requests_in, metrics_requests) = mpsc::channel(1);
        let (configs_in, configs) = watch::channel(Arc::clone(&config));
        let (stop, reports) = (CancellationToken::new(), reports());
        let controller = Controller::new(config, "node", reports.clone());
        let (choices_in, choices) = watch::channel(choice());
        let inputs = Inputs { updates, networks, metrics_requests, configs, choices, stop: stop.clone() };
        let runtime = tokio::runtime::Handle::current();
        let ended = std::thread::spawn(move || run(controller, inputs, &opener, || (), &runtime));
        Self {
            updates: updates_in,
            networks: networks_in,
            metrics_requests: MetricsRequests(requests_in),
            stop,
            reports,
            ended,
            _configs: configs_in,
            _choices: choices_in,
        }
    }

    fn stop(self) {
        self.stop.cancel();
        self.ended.join().unwrap().unwrap();
    }
}

async fn until(is_so: impl Fn() -> bool) {
    let so = async {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), so).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_opens_at_once_and_writes_after_all_lists() {
    let recorder = Recorder::default();
    let of_thread = recorder.clone();
    let started = Instant::now();
    let (opened_in, mut opened) = mpsc::unbounded_channel();
    let thread = Thread::start(move || {
        opened_in.send(()).unwrap();
        Ok(Box::new(of_thread))
    });

    thread.updates.send(Update::ReplaceServices(vec![service("a", "10.0.0.1")])).await.unwrap();
    thread.updates.send(Update::ReplaceSlices(Vec::new())).await.unwrap();
    thread.networks.send(Some(network(&[]))).unwrap();
    opened.recv().await.unwrap();
    assert!(thread.metrics_requests.families().await.is_none(), "the Node is missing");
    // What a predecessor has programmed serves on however long it takes to list the Node.
    until(|| recorder.lock().renewals > 0).await;
    assert_eq!(recorder.calls(), []);

    thread.updates.send(Update::Node(None)).await.unwrap();
    let families = loop {
        if let Some(families) = thread.metrics_requests.families().await {
            break families;
        }
    };
    assert_eq!(families[0].name, "of_the_mode");
    let calls = recorder.calls();
    assert!(matches!(calls.first(), Some(Call::SetHost(_))), "{calls:?}");
    assert_eq!(calls.get(1), Some(&Call::Resync(vec!["default/a".into()])));

    until(|| !recorder.lock().calls.is_empty()).await;
    let calls = recorder.calls();
    assert!(calls.iter().all(|call| *call == Call::CollectGarbage), "{calls:?}");
    let times = recorder.lock().renewals + calls.len();
    assert!(times as u64 <= started.elapsed().as_secs(), "{times} times, but once a second");
    thread.stop();
}

/// Without sources no change would be followed, and no error would show it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_sources_it_ends_with_an_error() {
    let Thread { updates, ended, .. } = Thread::start(|| Ok(Box::new(Recorder::default())));
    drop(updates);
    let ended = tokio::task::spawn_blocking(move || ended.join().unwrap());
    let ended = tokio::time::timeout(Duration::from_secs(30), ended).await.unwrap().unwrap();
    assert!(ended.unwrap_err().to_string().starts_with("the sources have ended"));
}

#[tokio::test]
async fn a_dataplane_that_does_not_open_ends_it() {
    let thread = Thread::start(|| Err(Error::new(ErrorKind::Other, "no cgroup v2 is mounted")));
    let ended = thread.ended.join().unwrap();
    assert!(ended.unwrap_err().to_string().contains("no cgroup v2 is mounted"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_call_that_does_not_come_back_is_unhealthy() {
    let (begun, began) = channel::channel();
    let (end, ended) = channel::channel::<()>();
    let thread = Thread::start(move || {
        begun.send(()).unwrap();
        ended.recv().unwrap();
        Ok(Box::new(Recorder::default()))
    });
    let healthy_in_a_minute = || {
        let now = Moment::now();
        let wait = Duration::from_secs(61);
        let later = Moment { instant: now.instant + wait, time: now.time + wait };
        thread.reports.health.lock().report(later).healthy
    };
    began.recv().unwrap();
    assert!(!healthy_in_a_minute());
    end.send(()).unwrap();
    until(healthy_in_a_minute).await;
    thread.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_ends_where_somebody_else_programs_the_node() {
    let recorder = Recorder::default();
    recorder.lock().taken_over = true;
    let of_thread = recorder.clone();
    let thread = Thread::start(move || Ok(Box::new(of_thread)));
    thread.updates.send(Update::ReplaceServices(Vec::new())).await.unwrap();
    thread.updates.send(Update::ReplaceSlices(Vec::new())).await.unwrap();
    thread.updates.send(Update::Node(None)).await.unwrap();
    thread.networks.send(Some(network(&[]))).unwrap();
    let Thread { ended, updates: _kept, .. } = thread;
    let ended = tokio::task::spawn_blocking(move || ended.join().unwrap());
    let ended = tokio::time::timeout(Duration::from_secs(30), ended).await.unwrap().unwrap();
    assert!(ended.unwrap_err().to_string().contains("process 7"), "who it is");
}

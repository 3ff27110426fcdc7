//! A TCP relay between a client and the API server that can be cut, like a broken network.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use anyhow::{Context, Result};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

/// Relay that ends when it is dropped. Its connections end with the runtime.
pub struct Relay {
    pub address: SocketAddr,
    open: watch::Sender<bool>,
    /// The number of times that the connections were frozen.
    frozen: watch::Sender<u32>,
    accepted: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Relay {
    /// Listens at `listen`, whose port may be 0, and passes connections on to `target`.
    pub async fn start(listen: SocketAddr, target: SocketAddr) -> Result<Self> {
        let (open, opened) = watch::channel(true);
        let frozen = watch::Sender::new(0);
        let freezes = frozen.clone();
        let accepted = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&accepted);
        let listener =
            TcpListener::bind(listen).await.with_context(|| format!("binding the relay to {listen}"))?;
        let address = listener.local_addr().context("binding the relay")?;
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let (mut opened, frozen) = (opened.clone(), freezes.subscribe());
                tokio::spawn(async move {
                    let open = *opened.borrow_and_update();
                    tokio::select! {
                        () = relay(client, target, open, frozen) => {}
                        // A change ends the connection, even if the network was restored before this
                        // is seen.
                        _ = opened.changed() => {}
                    }
                });
            }
        });
        Ok(Self { address, open, frozen, accepted, task })
    }

    /// Returns the number of connections that were accepted.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    /// Breaks all connections, and every new one as soon as it is made.
    pub fn cut(&self) {
        self.open.send_replace(false);
    }

    /// Forwards nothing more over the existing connections, and keeps them open, like a load
    /// balancer that has lost them without telling. New connections work.
    pub fn freeze(&self) {
        self.frozen.send_modify(|times| *times += 1);
    }

    pub fn restore(&self) {
        self.open.send_replace(true);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn relay(mut client: TcpStream, target: SocketAddr, open: bool, mut frozen: watch::Receiver<u32>) {
    if open && let Ok(mut server) = TcpStream::connect(target).await {
        tokio::select! {
            // Both sides are closed, however this ends.
            _ = copy_bidirectional(&mut client, &mut server) => {}
            _ = frozen.changed() => std::future::pending().await,
        }
    }
}

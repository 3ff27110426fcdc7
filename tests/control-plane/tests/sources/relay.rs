//! A TCP relay between the source and the API server that can be cut: a broken network.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::{Context, Result};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

use crate::world::World;

pub(crate) struct Relay {
    pub(crate) address: SocketAddr,
    open: watch::Sender<bool>,
    answered: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Relay {
    pub(crate) fn start(world: &World) -> Result<Self> {
        let target = world.server.socket_address();
        let (open, opened) = watch::channel(true);
        let answered = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&answered);
        world.block_on(async {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("binding the relay")?;
            let address = listener.local_addr().context("binding the relay")?;
            let task = tokio::spawn(async move {
                while let Ok((client, _)) = listener.accept().await {
                    let (mut opened, count) = (opened.clone(), Arc::clone(&count));
                    tokio::spawn(async move {
                        let open = *opened.borrow_and_update();
                        tokio::select! {
                            () = relay(client, target, open, &count) => {}
                            // Also if it is mended by the time that this is seen.
                            _ = opened.changed() => {}
                        }
                    });
                }
            });
            Ok(Self { address, open, answered, task })
        })
    }

    /// Bytes that the server has sent.
    pub(crate) fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Breaks all connections, and every new one as soon as it is made.
    pub(crate) fn cut(&self) {
        self.open.send_replace(false);
    }

    pub(crate) fn mend(&self) {
        self.open.send_replace(true);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn relay(mut client: TcpStream, target: SocketAddr, open: bool, answered: &AtomicU64) {
    if open && let Ok(mut server) = TcpStream::connect(target).await {
        let (mut from_client, mut to_client) = client.split();
        let (mut from_server, mut to_server) = server.split();
        let answers = async {
            let mut buffer = vec![0; 1 << 16];
            while let Ok(bytes @ 1..) = from_server.read(&mut buffer).await {
                answered.fetch_add(bytes as u64, Ordering::Relaxed);
                if to_client.write_all(&buffer[..bytes]).await.is_err() {
                    return;
                }
            }
        };
        // However it ends: both sides are closed.
        tokio::select! {
            () = answers => {}
            _ = copy(&mut from_client, &mut to_server) => {}
        }
    }
}

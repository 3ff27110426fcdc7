//! A TCP relay between the source and the API server that can be cut: a broken network.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context, Result};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

use crate::world::World;

pub(crate) struct Relay {
    pub(crate) address: SocketAddr,
    open: watch::Sender<bool>,
    /// The number of times that the connections were frozen.
    frozen: watch::Sender<u32>,
    task: JoinHandle<()>,
}

impl Relay {
    pub(crate) fn start(world: &World) -> Result<Self> {
        let target = world.server.socket_address();
        let (open, opened) = watch::channel(true);
        let frozen = watch::Sender::new(0);
        let freezes = frozen.clone();
        world.block_on(async {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("binding the relay")?;
            let address = listener.local_addr().context("binding the relay")?;
            let task = tokio::spawn(async move {
                while let Ok((client, _)) = listener.accept().await {
                    let (mut opened, frozen) = (opened.clone(), freezes.subscribe());
                    tokio::spawn(async move {
                        let open = *opened.borrow_and_update();
                        tokio::select! {
                            () = relay(client, target, open, frozen) => {}
                            // Also if it is mended by the time that this is seen.
                            _ = opened.changed() => {}
                        }
                    });
                }
            });
            Ok(Self { address, open, frozen, task })
        })
    }

    /// Breaks all connections, and every new one as soon as it is made.
    pub(crate) fn cut(&self) {
        self.open.send_replace(false);
    }

    /// Passes nothing on over the connections that there are now, and keeps them open: a load
    /// balancer that has lost them without telling. New ones work.
    pub(crate) fn freeze(&self) {
        self.frozen.send_modify(|times| *times += 1);
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

async fn relay(mut client: TcpStream, target: SocketAddr, open: bool, mut frozen: watch::Receiver<u32>) {
    if open && let Ok(mut server) = TcpStream::connect(target).await {
        tokio::select! {
            // However it ends: both sides are closed.
            _ = copy_bidirectional(&mut client, &mut server) => {}
            _ = frozen.changed() => std::future::pending().await,
        }
    }
}

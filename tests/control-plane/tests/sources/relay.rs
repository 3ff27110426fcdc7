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
    task: JoinHandle<()>,
}

impl Relay {
    pub(crate) fn start(world: &World) -> Result<Self> {
        let target = world.server.socket_address();
        let (open, opened) = watch::channel(true);
        world.block_on(async {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("binding the relay")?;
            let address = listener.local_addr().context("binding the relay")?;
            let task = tokio::spawn(async move {
                while let Ok((client, _)) = listener.accept().await {
                    let mut opened = opened.clone();
                    tokio::spawn(async move {
                        let open = *opened.borrow_and_update();
                        tokio::select! {
                            () = relay(client, target, open) => {}
                            // Also if it is mended by the time that this is seen.
                            _ = opened.changed() => {}
                        }
                    });
                }
            });
            Ok(Self { address, open, task })
        })
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

async fn relay(mut client: TcpStream, target: SocketAddr, open: bool) {
    if open && let Ok(mut server) = TcpStream::connect(target).await {
        // However it ends: both sides are closed.
        let _ = copy_bidirectional(&mut client, &mut server).await;
    }
}

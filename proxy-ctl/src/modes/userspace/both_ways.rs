//! Carries the bytes of one connection in both directions.

use std::{
    io,
    pin::pin,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split},
    time::{self, Instant},
};

/// The time that a connection lives without a byte once one side has said that it sends no more. A
/// peer that is alive and never closes would hold both sockets for ever, and keepalive does not
/// find it. kube-proxy has the kernel forget such a connection after the same time
/// (`conntrack.tcpCloseWaitTimeout`).
pub(super) const HALF_CLOSED_LIMIT: Duration = Duration::from_secs(3600);

/// The size of one direction's buffer, as in tokio's own copy.
const BUFFER: usize = 8 << 10;

/// The time at which one direction last carried a byte.
struct LastByte(Mutex<Instant>);

impl LastByte {
    fn now() -> Self {
        Self(Mutex::new(Instant::now()))
    }

    fn set(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn get(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Carries bytes until both sides have said that they send no more. The end of one side is passed
/// on to the other. Fails if one side has failed, or if only one has ended and the other is silent
/// for [`HALF_CLOSED_LIMIT`].
pub(super) async fn copy_both_ways<A, B>(a: &mut A, b: &mut B) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    let ((from_a, to_a), (from_b, to_b)) = (split(a), split(b));
    let (of_a, of_b) = (LastByte::now(), LastByte::now());
    let mut there = pin!(copy(from_a, to_b, &of_a));
    let mut back = pin!(copy(from_b, to_a, &of_b));
    tokio::select! {
        ended = &mut there => {
            ended?;
            until_silent(back, &of_b).await
        }
        ended = &mut back => {
            ended?;
            until_silent(there, &of_a).await
        }
    }
}

/// Carries one direction until its end, which it passes on.
async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    last: &LastByte,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return to.shutdown().await;
        }
        last.set();
        to.write_all(&buffer[..length]).await?;
        last.set();
    }
}

/// Carries the direction that is left, until it ends or is silent for [`HALF_CLOSED_LIMIT`].
async fn until_silent(
    mut direction: impl Future<Output = io::Result<()>> + Unpin,
    last: &LastByte,
) -> io::Result<()> {
    // The time begins with the end of the other direction.
    last.set();
    loop {
        let ends = last.get() + HALF_CLOSED_LIMIT;
        tokio::select! {
            ended = &mut direction => return ended,
            () = time::sleep_until(ends) => {
                if last.get() + HALF_CLOSED_LIMIT <= Instant::now() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{DuplexStream, duplex};

    use super::*;

    /// Returns a client and an endpoint whose connection is carried.
    fn carried() -> (DuplexStream, DuplexStream, tokio::task::JoinHandle<io::Result<()>>) {
        let ((client, mut a), (mut b, endpoint)) = (duplex(64), duplex(64));
        let carrying = tokio::spawn(async move { copy_both_ways(&mut a, &mut b).await });
        (client, endpoint, carrying)
    }

    async fn pass(from: &mut DuplexStream, to: &mut DuplexStream) {
        from.write_all(b"ping").await.unwrap();
        let mut heard = [0; 4];
        to.read_exact(&mut heard).await.unwrap();
        assert_eq!(&heard, b"ping");
    }

    #[tokio::test(start_paused = true)]
    async fn both_ends_are_passed_on() {
        let (mut client, mut endpoint, carrying) = carried();
        pass(&mut client, &mut endpoint).await;
        client.shutdown().await.unwrap();
        assert_eq!(endpoint.read(&mut [0; 4]).await.unwrap(), 0);
        pass(&mut endpoint, &mut client).await;
        endpoint.shutdown().await.unwrap();
        assert_eq!(client.read(&mut [0; 4]).await.unwrap(), 0);
        carrying.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_is_open_both_ways_may_be_silent_for_any_time() {
        let (mut client, mut endpoint, carrying) = carried();
        time::sleep(HALF_CLOSED_LIMIT * 100).await;
        pass(&mut client, &mut endpoint).await;
        assert!(!carrying.is_finished());
    }

    #[tokio::test(start_paused = true)]
    async fn a_half_closed_connection_lives_while_bytes_come() {
        let (mut client, mut endpoint, carrying) = carried();
        time::sleep(HALF_CLOSED_LIMIT * 2).await;
        client.shutdown().await.unwrap();
        for _ in 0..5 {
            time::sleep(HALF_CLOSED_LIMIT * 9 / 10).await;
            pass(&mut endpoint, &mut client).await;
        }
        assert!(!carrying.is_finished());
    }

    #[tokio::test(start_paused = true)]
    async fn a_half_closed_connection_that_is_silent_ends() {
        for by_client in [true, false] {
            let (mut client, mut endpoint, carrying) = carried();
            let closing = if by_client { &mut client } else { &mut endpoint };
            closing.shutdown().await.unwrap();
            let begun = Instant::now();
            let ended = time::timeout(HALF_CLOSED_LIMIT * 2, carrying).await.unwrap();
            assert_eq!(ended.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
            let lived = begun.elapsed();
            assert!(lived >= HALF_CLOSED_LIMIT && lived < HALF_CLOSED_LIMIT + Duration::from_secs(1));
        }
    }
}

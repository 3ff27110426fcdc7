//! How long a flow is kept after its last packet. The controller removes it then; the programs read no lifetime.

use core::time::Duration;

use crate::layout::*;

/// Longer than Linux waits before it asks whether the other side lives (net.ipv4.tcp_keepalive_time).
const PERHAPS_RESET: Duration = Duration::from_secs(10_800);

/// The most that a connection is kept while one side waits for an acknowledgement. It is the value
/// of nf_conntrack_tcp_timeout_unacknowledged: no pause between two retransmissions lasts longer.
const UNACKNOWLEDGED: Duration = Duration::from_secs(300);

/// By protocol and state.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FlowLifetimes {
    /// Until the client has shown that it receives answers.
    pub tcp_opening: Duration,
    pub tcp_established: Duration,
    /// After the FIN of one side: the other may go on sending for long.
    pub tcp_close_wait: Duration,
    /// After the FINs of both.
    pub tcp_closed: Duration,
    /// After a RST.
    pub tcp_reset: Duration,
    /// Until the backend has answered for longer than to one question.
    pub udp: Duration,
    pub udp_stream: Duration,
}

impl Default for FlowLifetimes {
    /// As conntrack of a node with a kube-proxy that is configured by nobody.
    fn default() -> Self {
        Self {
            tcp_opening: Duration::from_secs(60),
            tcp_established: Duration::from_secs(86_400),
            tcp_close_wait: Duration::from_secs(3_600),
            tcp_closed: Duration::from_secs(60),
            tcp_reset: Duration::from_secs(10),
            udp: Duration::from_secs(30),
            udp_stream: Duration::from_secs(120),
        }
    }
}

impl FlowLifetimes {
    /// `state` is the furthest that the flow's entries know of.
    pub fn of(&self, protocol: u8, state: FlowState) -> Duration {
        if protocol != PROTOCOL_TCP {
            return if state.progress < PROGRESS_SUSTAINED { self.udp } else { self.udp_stream };
        }
        let fins = (state.client_fin == FIN_ACKNOWLEDGED, state.backend_fin == FIN_ACKNOWLEDGED);
        match (state.reset, fins) {
            (RESET_CONFIRMED, _) => self.tcp_reset,
            (_, (true, true)) => self.tcp_closed,
            _ if state.progress < PROGRESS_CONFIRMED => self.tcp_opening,
            (_, (true, false) | (false, true)) => self.tcp_close_wait,
            (RESET_PLAUSIBLE, _) => self.tcp_established.min(PERHAPS_RESET),
            _ => self.tcp_established,
        }
    }

    /// Returns the lifetime of a connection of which one side has not acknowledged all that the
    /// other has sent. `state` is as for [`of`](Self::of).
    pub fn unacknowledged(&self, state: FlowState) -> Duration {
        self.of(PROTOCOL_TCP, state).min(UNACKNOWLEDGED)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn state(progress: u8, client_fin: u8, backend_fin: u8, reset: u8) -> FlowState {
        FlowState { progress, client_fin, backend_fin, reset }
    }

    const SET: FlowLifetimes = FlowLifetimes {
        tcp_opening: Duration::from_secs(1),
        tcp_established: Duration::from_secs(2),
        tcp_close_wait: Duration::from_secs(3),
        tcp_closed: Duration::from_secs(4),
        tcp_reset: Duration::from_secs(5),
        udp: Duration::from_secs(6),
        udp_stream: Duration::from_secs(7),
    };

    /// By default, and as set.
    #[rstest]
    #[case::opening(PROTOCOL_TCP, state(0, 0, 0, 0), 60, 1)]
    #[case::answered(PROTOCOL_TCP, state(PROGRESS_ANSWERED, 0, 0, 0), 60, 1)]
    #[case::open(PROTOCOL_TCP, state(PROGRESS_CONFIRMED, 0, 0, 0), 86_400, 2)]
    #[case::fins_that_nobody_acknowledged(
        PROTOCOL_TCP,
        state(PROGRESS_CONFIRMED, FIN_SEEN, FIN_SEEN, 0),
        86_400,
        2
    )]
    #[case::half_closed(PROTOCOL_TCP, state(PROGRESS_CONFIRMED, FIN_ACKNOWLEDGED, FIN_SEEN, 0), 3600, 3)]
    #[case::closed(PROTOCOL_TCP, state(PROGRESS_CONFIRMED, FIN_ACKNOWLEDGED, FIN_ACKNOWLEDGED, 0), 60, 4)]
    #[case::perhaps_reset(PROTOCOL_TCP, state(PROGRESS_CONFIRMED, 0, 0, RESET_PLAUSIBLE), 10_800, 2)]
    #[case::reset(PROTOCOL_TCP, state(PROGRESS_CONFIRMED, 0, 0, RESET_CONFIRMED), 10, 5)]
    #[case::datagrams_unanswered(PROTOCOL_UDP, state(0, 0, 0, 0), 30, 6)]
    #[case::one_answer(PROTOCOL_UDP, state(PROGRESS_ANSWERED, 0, 0, 0), 30, 6)]
    #[case::datagrams(PROTOCOL_UDP, state(PROGRESS_SUSTAINED, 0, 0, 0), 120, 7)]
    fn lifetimes(
        #[case] protocol: u8,
        #[case] state: FlowState,
        #[case] by_default: u64,
        #[case] as_set: u64,
    ) {
        assert_eq!(FlowLifetimes::default().of(protocol, state), Duration::from_secs(by_default));
        assert_eq!(SET.of(protocol, state), Duration::from_secs(as_set));
    }
}

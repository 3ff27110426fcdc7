//! The page `/debug/pprof/profile`: a CPU profile for `go tool pprof`.

use std::time::Duration;

use http::{HeaderValue, StatusCode, header};
use prost::Message as _;

use super::pprof::Profile;
use crate::{
    profile,
    serve::reply::{Reply, plain, reply},
};

const SECONDS: u64 = 30;
pub(in crate::serve) const MOST_SECONDS: u64 = 600;

/// Samples this process for as many seconds as the query asks for.
pub(super) async fn cpu(query: &str) -> Reply {
    let seconds = seconds(query).unwrap_or(SECONDS);
    if seconds > MOST_SECONDS {
        let problem = format!("seconds must be at most {MOST_SECONDS}, found {seconds}\n");
        return plain(StatusCode::BAD_REQUEST, problem);
    }
    let recorded = match profile::record(Duration::from_secs(seconds)).await {
        Ok(Some(recorded)) => recorded,
        Ok(None) => return failed("CPU profiling is in use"),
        Err(error) => return failed(&error.to_string()),
    };
    match tokio::task::spawn_blocking(move || Profile::of(recorded).encode_to_vec()).await {
        Ok(profile) => download(profile),
        Err(error) => failed(&error.to_string()),
    }
}

/// Returns the seconds in a query. As in Go, anything but a number above zero asks for the default.
fn seconds(query: &str) -> Option<u64> {
    let given = query.split('&').find_map(|part| part.strip_prefix("seconds="));
    given.and_then(|text| text.parse().ok()).filter(|number| *number > 0)
}

fn failed(problem: &str) -> Reply {
    plain(StatusCode::INTERNAL_SERVER_ERROR, format!("Could not take a CPU profile: {problem}\n"))
}

fn download(profile: Vec<u8>) -> Reply {
    let mut reply = reply(StatusCode::OK, "application/octet-stream", profile);
    let disposition = HeaderValue::from_static("attachment; filename=\"profile\"");
    reply.headers_mut().insert(header::CONTENT_DISPOSITION, disposition);
    reply
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("", None)]
    #[case("seconds=0", None)]
    #[case("seconds=-1", None)]
    #[case("seconds=soon", None)]
    #[case("debug=0&seconds=5", Some(5))]
    #[case("seconds=601", Some(601))]
    fn seconds_of_a_query(#[case] query: &str, #[case] expected: Option<u64>) {
        assert_eq!(seconds(query), expected);
    }
}

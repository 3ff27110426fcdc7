//! The pages that `enableProfiling` adds: the log level at `/debug/flags/v`.

use std::time::Duration;

use http::{Method, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Body;
use tokio::time::timeout;
use tower::BoxError;

use crate::{
    http::reply::{HTML, Reply, not_found, open, reply},
    log,
};

/// The largest body with a log level, in bytes. A level has few digits.
const LONGEST_LEVEL: usize = 1024;
/// The time limit for the whole body of a request.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

const FLAGS: &str = "<html>
<head>
<title>/debug/flags/</title>
</head>
<body>
/debug/flags/<br>
<br>
flags:<br>
<table>
<tr>v<br>
</table>
<br>
full flags configurable<br>
</body>
</html>
";

pub(super) async fn answer<B>(path: &str, method: &Method, body: B) -> Reply
where
    B: Body<Error: Into<BoxError>>,
{
    match path {
        "/debug/flags/v" if method == Method::PUT => {
            match timeout(BODY_TIMEOUT, Limited::new(body, LONGEST_LEVEL).collect()).await {
                Err(_) => short(StatusCode::REQUEST_TIMEOUT, "the request's body did not come in time"),
                Ok(Ok(level)) => set_level(&String::from_utf8_lossy(&level.to_bytes())),
                Ok(Err(error)) => {
                    short(StatusCode::BAD_REQUEST, &format!("error reading request body: {error}"))
                }
            }
        }
        "/debug/flags/v" => short(StatusCode::NOT_ACCEPTABLE, "unsupported http method"),
        "/debug/flags" => open(StatusCode::OK, HTML, FLAGS),
        path if path.starts_with("/debug/flags/") => open(StatusCode::OK, HTML, FLAGS),
        _ => not_found(),
    }
}

fn set_level(text: &str) -> Reply {
    let Ok(level) = text.parse::<u32>() else {
        let problem = format!("the log level must be a whole number from 0 on, found {text:?}");
        return short(StatusCode::BAD_REQUEST, &problem);
    };
    if log::set_verbosity(level) {
        tracing::info!(level, "the log level was changed");
        short(StatusCode::OK, &format!("successfully set klog.logging.verbosity to {text}"))
    } else {
        short(StatusCode::BAD_REQUEST, "the log level of this process cannot be changed")
    }
}

fn short(status: StatusCode, text: &str) -> Reply {
    reply(status, "text/plain", format!("{text}\n"))
}

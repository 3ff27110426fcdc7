//! Metrics of the requests to the API server, counted as client-go counts them.

use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use http::{Method, Request, Response, Uri};
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::Registry,
};

type Label = (&'static str, String);
type ByVerb = Family<[Label; 2], Histogram, fn() -> Histogram>;

/// The upper bounds of durations, in seconds.
const DURATION_BUCKETS: [f64; 12] = [0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];
/// The upper bounds of sizes, from 64 B to 16 MiB.
const SIZE_BUCKETS: [f64; 11] = [
    64.0,
    256.0,
    512.0,
    1024.0,
    4096.0,
    16_384.0,
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
];
/// The label `code` of a request that got no answer.
const NO_ANSWER: &str = "<error>";

/// The metric families `rest_client_…`. Clones count together.
#[derive(Clone, Debug)]
pub struct Requests {
    answers: Family<[Label; 3], Counter>,
    duration: ByVerb,
    limited: ByVerb,
    request_size: ByVerb,
    response_size: ByVerb,
}

impl Default for Requests {
    fn default() -> Self {
        let durations = || Histogram::new(DURATION_BUCKETS);
        let sizes = || Histogram::new(SIZE_BUCKETS);
        Self {
            answers: Family::default(),
            duration: Family::new_with_constructor(durations),
            limited: Family::new_with_constructor(durations),
            request_size: Family::new_with_constructor(sizes),
            response_size: Family::new_with_constructor(sizes),
        }
    }
}

impl Requests {
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("rest_client");
        registry.register("requests", "Requests to the API server, by answer", self.answers.clone());
        let histograms = [
            ("request_duration_seconds", "Time until an answer began", &self.duration),
            ("rate_limiter_duration_seconds", "Time that requests waited for their turn", &self.limited),
            ("request_size_bytes", "Size of requests", &self.request_size),
            ("response_size_bytes", "Size of answers that are no watches", &self.response_size),
        ];
        for (name, help, histogram) in histograms {
            registry.register(name, help, histogram.clone());
        }
    }

    /// Sends a request, which must have a whole URI, and counts the request and its answer.
    pub(super) async fn measure<B: Body, C: Body<Data = Bytes>, E>(
        self,
        request: Request<B>,
        send: impl AsyncFnOnce(Request<B>) -> Result<Response<C>, E>,
    ) -> Result<Response<impl Body<Data = Bytes, Error = C::Error>>, E> {
        let asked = SentRequest::new(&request);
        let answer = send(request).await;
        let code = answer.as_ref().map_or(NO_ANSWER.into(), |answer| answer.status().as_u16().to_string());
        self.answered(&asked, code);
        let answer = answer?;
        let size = (!asked.is_watch).then(|| self.response_size.get_or_create(&asked.labels()).clone());
        let mut size = Size { bytes: 0, histogram: size };
        Ok(answer.map(|body| {
            body.map_frame(move |frame| {
                size.add(&frame);
                frame
            })
        }))
    }

    /// Notes how long a request to `host` waited for the rate limit.
    pub(crate) fn waited(&self, method: &Method, host: String, time: Duration) {
        let labels = [("verb", method.to_string()), ("host", host)];
        self.limited.get_or_create(&labels).observe(time.as_secs_f64());
    }

    fn answered(&self, asked: &SentRequest, code: String) {
        let SentRequest { method, host, .. } = asked;
        self.answers
            .get_or_create(&[("code", code), ("method", method.clone()), ("host", host.clone())])
            .inc();
        self.duration.get_or_create(&asked.labels()).observe(asked.at.elapsed().as_secs_f64());
        self.request_size.get_or_create(&asked.labels()).observe(asked.bytes as f64);
    }
}

/// A request that was sent and is being measured.
struct SentRequest {
    method: String,
    host: String,
    bytes: u64,
    is_watch: bool,
    at: Instant,
}

impl SentRequest {
    fn new<B: Body>(request: &Request<B>) -> Self {
        Self {
            method: request.method().to_string(),
            host: host(request.uri()),
            bytes: request.body().size_hint().exact().unwrap_or(0),
            is_watch: is_watch(request.uri()),
            at: Instant::now(),
        }
    }

    fn labels(&self) -> [Label; 2] {
        [("verb", self.method.clone()), ("host", self.host.clone())]
    }
}

/// Returns the host of a URI, with its port if it has one. The part before an `@` is left out,
/// because it is secret.
pub(crate) fn host(uri: &Uri) -> String {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    authority.rsplit('@').next().unwrap_or_default().to_owned()
}

pub(super) fn is_watch(uri: &Uri) -> bool {
    uri.query().is_some_and(|query| query.split('&').any(|part| matches!(part, "watch=true" | "watch=1")))
}

/// The size of an answer. It is observed when the answer has been read or is given up.
struct Size {
    bytes: u64,
    /// The histogram that gets the size. None for a watch, whose size has no meaning.
    histogram: Option<Histogram>,
}

impl Size {
    fn add(&mut self, frame: &Frame<Bytes>) {
        self.bytes += frame.data_ref().map_or(0, |data| data.remaining() as u64);
    }
}

impl Drop for Size {
    fn drop(&mut self) {
        if let Some(histogram) = &self.histogram {
            histogram.observe(self.bytes as f64);
        }
    }
}

#[cfg(test)]
impl Requests {
    /// Gives every metric family a sample.
    pub(crate) fn sample(&self) {
        let asked = SentRequest::new(&Request::new(kube::client::Body::empty()));
        self.waited(&Method::GET, String::new(), Duration::ZERO);
        self.answered(&asked, NO_ANSWER.into());
        self.response_size.get_or_create(&asked.labels()).observe(0.0);
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;

    use super::*;

    /// Returns the metrics after these requests, each answered with this status or not at all.
    async fn counted(requests: &[(&str, Option<u16>)]) -> String {
        let counts = Requests::default();
        for &(uri, status) in requests {
            let server = async |_: Request<Full<Bytes>>| match status {
                Some(status) => {
                    let body = Full::new(Bytes::from_static(b"0123456789"));
                    Ok(Response::builder().status(status).body(body).unwrap())
                }
                None => Err("connection refused"),
            };
            let request = Request::get(uri).body(Full::new(Bytes::new())).unwrap();
            if let Ok(answer) = counts.clone().measure(request, server).await {
                answer.into_body().collect().await.unwrap();
            }
        }
        let mut registry = Registry::default();
        counts.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    }

    #[tokio::test]
    async fn answers_times_and_sizes() {
        let text = counted(&[
            ("https://192.0.2.1:6443/api/v1/nodes", Some(200)),
            ("https://user:secret@192.0.2.1:6443/api/v1/nodes?limit=5", Some(403)),
            ("https://192.0.2.1:6443/api/v1/nodes?limit=5&watch=true", Some(200)),
            ("https://192.0.2.1:6443/api/v1/nodes", None),
        ])
        .await;
        for line in [
            r#"rest_client_requests_total{code="200",method="GET",host="192.0.2.1:6443"} 2"#,
            r#"rest_client_requests_total{code="403",method="GET",host="192.0.2.1:6443"} 1"#,
            r#"rest_client_requests_total{code="<error>",method="GET",host="192.0.2.1:6443"} 1"#,
            r#"rest_client_request_duration_seconds_count{verb="GET",host="192.0.2.1:6443"} 4"#,
            r#"rest_client_request_size_bytes_bucket{le="64.0",verb="GET",host="192.0.2.1:6443"} 4"#,
            r#"rest_client_response_size_bytes_count{verb="GET",host="192.0.2.1:6443"} 2"#,
            r#"rest_client_response_size_bytes_sum{verb="GET",host="192.0.2.1:6443"} 20.0"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}

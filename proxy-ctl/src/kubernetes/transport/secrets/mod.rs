//! Removal of credentials from error messages: a proxy on the way may repeat the request in its
//! error page.

use base64::prelude::{BASE64_STANDARD, Engine as _};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Response, header::AUTHORIZATION};
use http_body_util::{BodyExt as _, Either, Full};
use tower::BoxError;

/// The number of bytes that are read of an answer that is an error.
pub(crate) const LONGEST_ERROR: usize = 1 << 20;
/// The byte that overwrites secrets. A secret keeps its length, so that the encoding around it
/// stays valid.
const COVER: u8 = b'x';

/// The credentials of a request, in each form in which an answer may repeat them.
pub(crate) struct Secrets(Vec<String>);

impl Secrets {
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let authorization =
            headers.get(AUTHORIZATION).and_then(|value| std::str::from_utf8(value.as_bytes()).ok());
        let Some((_, sent)) = authorization.and_then(|value| value.split_once(' ')) else {
            return Self(Vec::new());
        };
        let decoded = BASE64_STANDARD.decode(sent).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let password = decoded.and_then(|user| Some(user.split_once(':')?.1.to_owned()));
        let plain =
            [Some(sent.to_owned()), password].into_iter().flatten().filter(|secret| !secret.is_empty());
        Self(plain.flat_map(|secret| [in_json(&secret), secret]).collect())
    }

    /// Removes the secrets from the body of an answer that is an error. Any other answer is
    /// returned as it is.
    pub(super) async fn cover<B>(
        self,
        answer: Response<B>,
    ) -> Result<Response<Either<B, Full<Bytes>>>, BoxError>
    where
        B: hyper::body::Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static,
    {
        let (head, mut body) = answer.into_parts();
        if !(head.status.is_client_error() || head.status.is_server_error()) {
            return Ok(Response::from_parts(head, Either::Left(body)));
        }
        let mut text = BytesMut::new();
        while text.len() < LONGEST_ERROR
            && let Some(frame) = body.frame().await.transpose().map_err(Into::into)?
        {
            text.extend_from_slice(frame.data_ref().map_or(&[], |data| data.as_ref()));
        }
        self.0.iter().for_each(|secret| overwrite(&mut text, secret.as_bytes()));
        Ok(Response::from_parts(head, Either::Right(text.freeze().into())))
    }
}

fn in_json(text: &str) -> String {
    serde_json::Value::from(text).to_string().trim_matches('"').to_owned()
}

fn overwrite(text: &mut [u8], secret: &[u8]) {
    let mut from = 0;
    while let Some(found) = text[from..].windows(secret.len()).position(|part| part == secret) {
        let end = from + found + secret.len();
        text[from + found..end].fill(COVER);
        from = end;
    }
}

#[cfg(test)]
mod tests;

//! Objects of the API group networking.k8s.io/v1.

use super::{messages, meta::ObjectMeta};

messages! {
    ServiceCidr {
        (1, message, required) metadata: ObjectMeta,
        (2, message, required) spec: ServiceCidrSpec,
    }

    ServiceCidrSpec {
        (1, string, repeated) cidrs: Vec<String>,
    }
}

#!/usr/bin/env python3
"""Claims a machine of a Cluster, waits until it is a Node, and releases it.

It is an example of a tool that calls an agent; docs/clients.md explains it. It needs grpcio and protobuf, and no generated code.
"""

import argparse
import json
import pathlib
import sys
import time

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# The party that owns the claims. The identity of the certificate determines which holders it may act as.
HOLDER = "claimer"
# The domain of the agent's own details of errors.
DOMAIN = "agent.karpenter.cluster.x-k8s.io"
DEADLINE = 10  # of a call, seconds
PACKAGE = "capi.agent.v1alpha1"


class API:
    """The messages and methods of a descriptor set."""

    def __init__(self, path):
        self.pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(pathlib.Path(path).read_bytes()).file:
            self.pool.Add(file)

    def message(self, name):
        """Returns the class of a message, given its full name."""
        descriptor = self.pool.FindMessageTypeByName(name)
        if hasattr(message_factory, "GetMessageClass"):
            return message_factory.GetMessageClass(descriptor)
        return message_factory.MessageFactory(self.pool).GetPrototype(descriptor)  # protobuf before 4.22

    def value(self, enum, number):
        """Returns the name of a value of an enum."""
        return self.pool.FindEnumTypeByName(f"{PACKAGE}.{enum}").values_by_number[number].name

    def details(self, error):
        """Yields the details of an error that this descriptor set knows."""
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                for detail in self.message("google.rpc.Status").FromString(value).details:
                    message = self.message(detail.TypeName())()
                    if detail.Unpack(message):
                        yield message


class Agent:
    """An agent, with a method for each of its API's: agent.call("ClaimService/CreateClaim", cluster=…)."""

    def __init__(self, api, channel):
        self.api = api
        self.methods = {}
        for service in ("NodeGroupService", "ClaimService"):
            for method in api.pool.FindServiceByName(f"{PACKAGE}.{service}").methods:
                streams = descriptor_pb2.MethodDescriptorProto()
                method.CopyToProto(streams)
                connect = channel.unary_stream if streams.server_streaming else channel.unary_unary
                request = api.message(method.input_type.full_name)
                self.methods[f"{service}/{method.name}"] = request, connect(
                    f"/{PACKAGE}.{service}/{method.name}",
                    request_serializer=request.SerializeToString,
                    response_deserializer=api.message(method.output_type.full_name).FromString,
                )

    def call(self, method, timeout=DEADLINE, **fields):
        request, send = self.methods[method]
        return send(request(**fields), timeout=timeout)


def connect(address, certificates):
    # Every call that is retried is idempotent. Pings notice a dead network while a stream is silent.
    retries = {"maxAttempts": 4, "initialBackoff": "0.2s", "maxBackoff": "1s", "backoffMultiplier": 2,
               "retryableStatusCodes": ["UNAVAILABLE"]}
    names = [{"service": f"{PACKAGE}.NodeGroupService"}, {"service": f"{PACKAGE}.ClaimService"}]
    options = [
        ("grpc.service_config", json.dumps({"methodConfig": [{"name": names, "retryPolicy": retries}]})),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.max_receive_message_length", 64 << 20),  # a list is complete, or an error
    ]
    if certificates is None:
        return grpc.insecure_channel(address, options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=(certificates / "ca.crt").read_bytes(),
        private_key=(certificates / "tls.key").read_bytes(),
        certificate_chain=(certificates / "tls.crt").read_bytes(),
    )
    return grpc.secure_channel(address, credentials, options)


def cheapest_first(groups):
    """Returns the IDs of the node groups that take claims now. Those without a price come last."""
    available = [group for group in groups if group.availability.available]
    available.sort(key=lambda group: group.price.per_hour if group.HasField("price") else float("inf"))
    return [group.id for group in available]


def claim(agent, cluster, claim_id, candidates):
    """Makes the claim durable. Its machine comes later."""
    while True:
        try:
            created = agent.call("ClaimService/CreateClaim", cluster=cluster, claim_id=claim_id, holder=HOLDER, candidates=candidates)
            print("claimed from:", created.claim.node_group_id)
            return
        except grpc.RpcError as error:
            details = list(agent.api.details(error))
            infos = [d for d in details if d.DESCRIPTOR.name == "ErrorInfo" and d.domain == DOMAIN]
            rejections = [info for info in infos if "node_group" in info.metadata]
            reasons = [info.reason for info in infos]
            if "CONFLICT" in reasons:
                continue  # Another writer was faster. The same id makes it safe to repeat the call.
            if "CLAIM_ENDED" in reasons:
                sys.exit(f"claim {claim_id} has ended as {infos[0].metadata['reason']}; choose another id")
            if rejections:
                for rejection in rejections:
                    why = rejection.metadata["reason"] or rejection.reason
                    print(f"rejected: {rejection.metadata['node_group']}: {why}: {rejection.metadata['message']}")
                sys.exit("no machine can be claimed")
            if not unavailable(error) and "THROTTLED" not in reasons:
                raise
            # The claim may exist. The same id finds it, or makes it.
            time.sleep(retry_delay(details))


def unavailable(error):
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def retry_delay(details):
    """Returns how many seconds to wait: as long as the error asks, or one."""
    for detail in details:
        if detail.DESCRIPTOR.name == "RetryInfo":
            return detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9
    return 1


def follow(agent, cluster, claim_id):
    """Yields the claim as it is now, then whenever it changes. It reconnects by itself."""
    while True:
        try:
            for event in agent.call("ClaimService/WatchClaims", timeout=None, cluster=cluster, holder=HOLDER):
                if event.HasField("upsert") and event.upsert.claim_id == claim_id:
                    yield event.upsert
        except grpc.RpcError as error:
            if not unavailable(error):
                raise
        time.sleep(1)


def release(agent, cluster, claim_id):
    """Returns the claim's machine. It is safe to repeat, and succeeds for a claim that was never made."""
    while True:
        try:
            agent.call("ClaimService/ReleaseClaim", cluster=cluster, claim_id=claim_id, reason="the example is over")
            return
        except grpc.RpcError as error:
            if not unavailable(error) and error.code() != grpc.StatusCode.ABORTED:
                raise
            time.sleep(retry_delay(agent.api.details(error)))


def main():
    here = pathlib.Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-address", default="127.0.0.1:8443", help="the agent's host:port")
    parser.add_argument("-certificates", type=pathlib.Path,
                        help="the folder with tls.crt, tls.key and ca.crt; none for an agent on loopback without TLS")
    parser.add_argument("-descriptors", default=here / "../../../proto/descriptors.binpb", help="the descriptor set of the API")
    parser.add_argument("-cluster", default="fleet/spoke", help="the namespace/name of the Cluster")
    parser.add_argument("-node-group", help="the namespace/name of the only node group to claim from; none for all that are available")
    parser.add_argument("-claim-id", required=True, help="a DNS label that no claim of the Cluster has ever used")
    options = parser.parse_args()

    api = API(options.descriptors)
    namespace, _, name = options.cluster.partition("/")
    cluster = {"namespace": namespace, "name": name}
    with connect(options.address, options.certificates) as channel:
        agent = Agent(api, channel)
        candidates = [options.node_group]
        if options.node_group is None:
            candidates = cheapest_first(agent.call("NodeGroupService/ListNodeGroups", cluster=cluster).node_groups)
            print("candidates:", ", ".join(candidates))

        released, shown = False, ""
        try:
            claim(agent, cluster, options.claim_id, candidates)
            for current in follow(agent, cluster, options.claim_id):
                phase = api.value("ClaimPhase", current.phase)
                if f"{phase} {current.reason}" != shown:
                    shown = f"{phase} {current.reason}"
                    print(shown)
                if phase == "CLAIM_PHASE_ENDED":
                    if not released:
                        released = True  # There is nothing left to release.
                        sys.exit(f"claim {options.claim_id} has ended as {current.reason}: {current.message}")
                    break
                if current.machine.node_name and not released:
                    print(f"node: {current.machine.node_name}, instance: {current.machine.provider_id}")
                    release(agent, cluster, options.claim_id)
                    released = True
        finally:
            # Whatever happens, the machine must not be left behind. A claim whose answer was lost exists, too.
            if not released:
                release(agent, cluster, options.claim_id)


if __name__ == "__main__":
    try:
        main()
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")

"""Requests with bodies made of templates, at a receiver and at a stand-in of AWS that isn't ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.ports import start_on_free_port
from support.programs import start_program
from support.receiver import Receiver
from support.site import Site

REGION = "eu-west-1"


class Aws:
    """moto's server. It checks every signature from the fourth request on."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._key = ("any", "any")
        iam = self.client("iam")
        iam.create_user(UserName="ulak")
        policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
        iam.put_user_policy(UserName="ulak", PolicyName="all", PolicyDocument=json.dumps(policy))
        key = iam.create_access_key(UserName="ulak")["AccessKey"]
        self._key = (key["AccessKeyId"], key["SecretAccessKey"])

    def client(self, service: str) -> Any:
        access_key, secret_key = self._key
        return boto3.client(
            service, REGION, endpoint_url=self.url, aws_access_key_id=access_key, aws_secret_access_key=secret_key
        )

    def auth(self, service: str) -> dict[str, str]:
        access_key, secret_key = self._key
        return {
            "type": "aws_sigv4",
            "access_key": access_key,
            "secret_key": secret_key,
            "region": REGION,
            "service": service,
        }


def test_a_receiver_gets_the_body_that_the_template_makes_and_its_signature_fits(
    site: Site, receiver: Receiver
) -> None:
    site.http("chat", receiver.url, body={"text": "Order {payload.id} is paid"}, signing_secret="a good secret")
    site.start()

    site.send("chat", {"id": 7})

    (request,) = receiver.wait_for(1)
    assert json.loads(request.body) == {"text": "Order 7 is paid"}
    assert request.headers["content-length"] == str(len(request.body))


def test_a_message_that_does_not_fit_fails_alone_and_the_circuit_stays_closed(site: Site, receiver: Receiver) -> None:
    site.http("chat", receiver.url, body={"text": "Order {payload.id} is paid"})
    site.start()
    wrong, right = site.send("chat", {"number": 7}), site.send("chat", {"id": 8})

    site.wait_for_status(right, "completed")

    error = site.wait_for_status(wrong, "failed")["last_error"]
    assert error == "[PERMANENT] message: the message has nothing for {payload.id} in the body"
    assert (len(receiver.requests), site.circuit("chat")["circuit_failure_count"]) == (1, 0)


def test_a_ping_shows_the_template(site: Site, receiver: Receiver) -> None:
    site.http("chat", receiver.url, body={"text": "Order {payload.id} is paid"})

    assert site.rows("select outcome from ulak.ping('chat')") == [{"outcome": "delivered"}]

    assert json.loads(receiver.requests[0].body) == {"text": "Order {payload.id} is paid"}


def test_the_body_of_a_subscription_and_its_change_reach_a_worker_that_runs(site: Site, receiver: Receiver) -> None:
    site.call("create_event_type", "order.paid")
    site.http("chat", receiver.url, body={"text": "own"})
    site.start()
    site.wait_for_status(site.send("chat", {"id": 6}), "completed")

    id = site.value("""select ulak.subscribe('order.*', 'chat', p_body => '{"text": "Order {payload.id} is paid"}')""")
    site.value("""select ulak.publish('order.paid', '{"id": 7}')""")
    receiver.wait_for(2)
    site.value("""select ulak.alter_subscription(%s, p_body => '{"text": "{payload.id}"}')""", id)
    site.value("""select ulak.publish('order.paid', '{"id": 8}')""")
    receiver.wait_for(3)
    site.value("""select ulak.publish('order.paid', '{"number": 9}')""")
    site.wait_until_settled()
    site.call("drop_event_type", "order.paid")
    site.call("unsubscribe", id)

    assert [json.loads(each.body)["text"] for each in receiver.requests] == ["own", "Order 7 is paid", "8"]
    (error,) = site.rows("select last_error from ulak.dlq where endpoint_name = 'chat'")
    assert error == {"last_error": "[PERMANENT] message: the message has nothing for {payload.id} in the body"}


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aws]:
    log = Path(tmp_path_factory.mktemp("moto")) / "log"
    environment = os.environ | {"INITIAL_NO_AUTH_ACTION_COUNT": "3"}

    def start(port: int) -> tuple[subprocess.Popen[bytes], int]:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        return start_program(command, log, lambda: "Running on" in log.read_text(), env=environment), port

    server, port = start_on_free_port(start)
    try:
        yield Aws(f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait()


def taken(sqs: Any, queue: str) -> str:
    return str(sqs.receive_message(QueueUrl=queue)["Messages"][0]["Body"])


def test_sqs_takes_messages(site: Site, aws: Aws) -> None:
    sqs = aws.client("sqs")
    queue = sqs.create_queue(QueueName="orders")["QueueUrl"]
    headers = {"content-type": "application/x-amz-json-1.0", "x-amz-target": "AmazonSQS.SendMessage"}
    body = {"QueueUrl": queue, "MessageBody": "{payload}"}
    site.http("sqs", aws.url, auth=aws.auth("sqs"), headers=headers, body=body)
    site.start()

    site.wait_for_status(site.send("sqs", {"id": 7, "name": "Zoë"}), "completed")

    assert json.loads(taken(sqs, queue)) == {"id": 7, "name": "Zoë"}


def test_sns_takes_messages(site: Site, aws: Aws) -> None:
    sqs, sns = aws.client("sqs"), aws.client("sns")
    queue = sqs.create_queue(QueueName="told")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    topic = sns.create_topic(Name="orders")["TopicArn"]
    sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn, Attributes={"RawMessageDelivery": "true"})
    body = f"Action=Publish&Version=2010-03-31&TopicArn={topic.replace(':', '%3A')}&Message={{payload}}"
    headers = {"content-type": "application/x-www-form-urlencoded"}
    site.http("sns", aws.url, auth=aws.auth("sns"), headers=headers, body=body)
    site.start()

    site.wait_for_status(site.send("sns", {"id": 7, "name": "Zoë & Co = 1+1"}), "completed")

    assert json.loads(taken(sqs, queue)) == {"id": 7, "name": "Zoë & Co = 1+1"}


def test_eventbridge_takes_events(site: Site, aws: Aws) -> None:
    sqs, events = aws.client("sqs"), aws.client("events")
    queue = sqs.create_queue(QueueName="events")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    events.put_rule(Name="all", EventPattern='{"source": ["shop"]}')
    events.put_targets(Rule="all", Targets=[{"Id": "1", "Arn": arn}])
    headers = {"content-type": "application/x-amz-json-1.1", "x-amz-target": "AWSEvents.PutEvents"}
    entry = {"Source": "shop", "DetailType": "{metadata.event_type}", "Detail": "{payload}"}
    site.http("bridge", aws.url, auth=aws.auth("events"), headers=headers, body={"Entries": [entry]})
    site.start()

    site.wait_for_status(site.send("bridge", {"id": 7}, metadata={"event_type": "order.paid"}), "completed")

    event = json.loads(taken(sqs, queue))
    assert (event["source"], event["detail-type"], event["detail"]) == ("shop", "order.paid", {"id": 7})


def test_a_wrong_key_is_refused(site: Site, aws: Aws) -> None:
    headers = {"content-type": "application/x-amz-json-1.0", "x-amz-target": "AmazonSQS.ListQueues"}
    site.http("sqs", aws.url, auth=aws.auth("sqs") | {"secret_key": "wrong"}, headers=headers, body={"MaxResults": 1})
    site.start()

    assert "SignatureDoesNotMatch" in site.wait_for_error(site.send("sqs"), "HTTP 403")

"""What became of a message, announced by a real worker to a webhook."""

from __future__ import annotations

import json

from support.receiver import Answer, Receiver
from support.site import Site


def test_the_answer_of_a_receiver_comes_back_to_the_sender_as_a_webhook(site: Site, receiver: Receiver) -> None:
    site.configure(capture_response="true")
    with Receiver(Answer(201, {}, b'{"invoice": 7}')) as billing:
        site.http("billing", billing.url, announce=["delivered"])
        site.http("callbacks", receiver.url)
        site.call("subscribe", "ulak.message.delivered", "callbacks")
        site.start()

        id = site.send("billing", metadata={"order": 4})
        (request,) = receiver.wait_for(1)

    event = json.loads(request.body)
    assert request.headers["ulak-event-type"] == "ulak.message.delivered"
    assert (event["message"], event["metadata"]) == (id, {"order": 4})
    assert (event["response"]["status"], event["response"]["body"]) == (201, '{"invoice": 7}')

"""A schema for the programs that ask for objects, and the ways in which an object came."""

from pydantic import BaseModel, ConfigDict, Field

done = []


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


def check(way, person):
    """Add a way that gave a person."""
    assert isinstance(person, Person), (way, person)
    done.append(way)

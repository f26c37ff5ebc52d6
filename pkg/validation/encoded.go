package validation

import (
	"fmt"
	"sync"

	"buf.build/go/protovalidate"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

// CheckEncoded returns nil if the lists and maps of an encoded message have no more elements than
// its constraints allow. Otherwise it returns INVALID_ARGUMENT with the first field that has too
// many. Two bytes on the wire can become a hundred in memory, so a message with too many elements
// must not be decoded. CheckEncoded itself allocates next to nothing, whatever the message
// contains. A message that cannot be parsed passes, and will fail to decode. [Validator.Check]
// checks the other constraints.
func (v *Validator) CheckEncoded(message protoreflect.MessageDescriptor, encoded []byte) error {
	exceeded := v.counts.of(message).check(encoded, 0)
	if exceeded == nil {
		return nil
	}
	return agenterrors.InvalidArgument(*exceeded)
}

// counts caches how many elements each message's fields may have.
type counts struct {
	mu       sync.Mutex
	messages map[protoreflect.FullName]messageCounts
}

// messageCounts are, by number, the fields of a message that are limited or contain messages.
type messageCounts map[protowire.Number]fieldCounts

type fieldCounts struct {
	name string
	list bool
	// most is the maximum number of elements of the field, or 0 for no limit.
	most    uint64
	element messageCounts // nil unless the elements are messages
}

// maxDepth is the maximum depth to which messages are checked. No request is nested that deeply.
const maxDepth = 16

func (c *counts) of(message protoreflect.MessageDescriptor) messageCounts {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.countsOf(message)
}

// countsOf must be called with c.mu held.
func (c *counts) countsOf(message protoreflect.MessageDescriptor) messageCounts {
	if known, ok := c.messages[message.FullName()]; ok {
		return known
	}
	fields := messageCounts{}
	// The message is stored before its fields are examined, as it may contain its own type.
	c.messages[message.FullName()] = fields
	for i := range message.Fields().Len() {
		field := message.Fields().Get(i)
		counted := fieldCounts{name: string(field.Name()), list: field.IsList(), most: mostOf(field)}
		if field.Message() != nil && !field.IsMap() {
			counted.element = c.countsOf(field.Message())
		}
		if counted.most > 0 || counted.element != nil {
			fields[field.Number()] = counted
		}
	}
	return fields
}

// mostOf returns how many elements a list or map may have, or 0 if its constraints set no limit.
func mostOf(field protoreflect.FieldDescriptor) uint64 {
	rules, err := protovalidate.ResolveFieldRules(field)
	switch {
	case err != nil || rules == nil:
		return 0
	case field.IsMap():
		return rules.GetMap().GetMaxPairs()
	case field.IsList():
		return rules.GetRepeated().GetMaxItems()
	}
	return 0
}

// check returns the first field with too many elements, or nil if there is none.
func (m messageCounts) check(encoded []byte, depth int) *agenterrors.FieldViolation {
	if depth > maxDepth {
		return nil
	}
	var seen map[protowire.Number]uint64
	for len(encoded) > 0 {
		number, kind, length := protowire.ConsumeTag(encoded)
		if length < 0 {
			return nil
		}
		encoded = encoded[length:]
		length = protowire.ConsumeFieldValue(number, kind, encoded)
		if length < 0 {
			return nil
		}
		field, counted := m[number]
		if counted && kind == protowire.BytesType {
			if exceeded := field.check(encoded[:length], seen[number], depth); exceeded != nil {
				return exceeded
			}
			if seen == nil {
				seen = map[protowire.Number]uint64{}
			}
			seen[number]++
		}
		encoded = encoded[length:]
	}
	return nil
}

// check checks a length-prefixed value of the field. others is the number of values before it.
func (f fieldCounts) check(value []byte, others uint64, depth int) *agenterrors.FieldViolation {
	if f.most > 0 && others >= f.most {
		return &agenterrors.FieldViolation{Field: f.name, Description: fmt.Sprintf("must have at most %d elements", f.most)}
	}
	if f.element == nil {
		return nil
	}
	content, length := protowire.ConsumeBytes(value)
	if length < 0 {
		return nil
	}
	exceeded := f.element.check(content, depth+1)
	if exceeded == nil {
		return nil
	}
	if f.list {
		exceeded.Field = fmt.Sprintf("%s[%d].%s", f.name, others, exceeded.Field)
	} else {
		exceeded.Field = f.name + "." + exceeded.Field
	}
	return exceeded
}

package netchaos

import (
	"context"
	"fmt"
	"time"

	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/test/badlink"
)

// scenario is one way in which the network is bad.
type scenario struct {
	name string
	// about says what is bad, in a sentence.
	about string
	// conditions are those of the link all the time, if there is no outage.
	conditions badlink.Conditions
	outage     *outage
}

// outage is something that happens to the link.
type outage struct {
	begin func(ctx context.Context, s *stage) error
	// lasts is how long until the link is good again. Zero if it never is, and the shim has to find another way.
	lasts time.Duration
	// compressed outages, and the product's periods, are shorter by [Options].Compress.
	compressed bool
}

const (
	slow = 250 * time.Millisecond
	// partition is longer than it takes to notice one.
	partition = 45 * time.Second
	// long is how long the longest partition lasts, before it is compressed.
	long = 10 * time.Minute
	// narrow is a rate in bits a second.
	narrow = 1_000_000
)

// good is what the others are compared with.
var good = scenario{name: "good", about: "nothing is bad"}

func scenarios() []scenario {
	steady := func(name, about string, conditions badlink.Conditions) scenario {
		return scenario{name: name, about: about, conditions: conditions}
	}
	during := func(name, about string, conditions badlink.Conditions, lasts time.Duration) scenario {
		return scenario{name: name, about: about, outage: &outage{
			begin: func(_ context.Context, s *stage) error { return s.link.Set(conditions) }, lasts: lasts, compressed: lasts == long,
		}}
	}
	all := []scenario{good}
	for _, rtt := range []time.Duration{time.Millisecond, 50 * time.Millisecond, slow} {
		all = append(all, steady(fmt.Sprintf("RTT %d ms", rtt.Milliseconds()), "the agents are far away", badlink.Conditions{RTT: rtt}))
	}
	for _, loss := range []float64{1, 10} {
		all = append(all, steady(fmt.Sprintf("loss %.0f %%", loss), "packets are lost, in both directions", badlink.Conditions{Loss: loss}))
	}
	all = append(all,
		steady("1 Mbit/s", "the link is narrow", badlink.Conditions{Rate: narrow}),
		steady("all of it", "far away, narrow, and packets are lost", badlink.Conditions{RTT: slow, Loss: 1, Rate: narrow}),
	)
	for _, lasts := range []time.Duration{time.Second, 30 * time.Second, partition, long} {
		all = append(all, during("partition "+short(lasts), "nothing passes", badlink.Down, lasts))
	}
	return append(all,
		during("requests lost "+short(partition), "the agents hear nothing, and are heard", badlink.Conditions{Mute: true}, partition),
		during("answers lost "+short(partition), "the agents hear everything, and are not heard", badlink.Conditions{Deaf: true}, partition),
		scenario{name: "half-open", about: "a gateway forgets the connection; neither end is told, and new ones pass", outage: &outage{
			begin: func(_ context.Context, s *stage) error { return s.link.Forget() },
		}},
		scenario{name: "another address", about: "the agents' name leads to another address, and the former one is silent", outage: &outage{
			begin: func(_ context.Context, s *stage) error { return s.moveAgents() },
		}},
	)
}

// short is a duration as scenarios are named.
func short(d time.Duration) string {
	return lo.Ternary(d < time.Minute, fmt.Sprintf("%.0f s", d.Seconds()), fmt.Sprintf("%.0f min", d.Minutes()))
}
